// Threads that run ranges of a call side by side, without any other runtime: they wait between calls, never hold the
// interpreter's lock, run at a lower priority than the thread that launches work on a GPU, and leave it some cores.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __unix__
#include <pthread.h>
#endif
#ifdef __linux__
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

class WorkerPool {
 public:
  using Range = std::function<void(int64_t begin, int64_t end)>;

  // The process's own pool; a forked child, which has none of its parent's threads, gets a new one.
  static WorkerPool& instance() {
    static std::once_flag once;
    std::call_once(once, [] {
      current() = new WorkerPool;
#ifdef __unix__
      pthread_atfork(nullptr, nullptr, [] { current() = new WorkerPool; });
#endif
    });
    return *current();
  }

  // Call range(begin, end) for pieces of `size` that cover [0, items), on `threads` threads, and wait for all. New
  // threads keep off the first `spared` of the cores that this process may use.
  void run(int64_t items, int64_t size, int threads, int niceness, int spared, const Range& range) {
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(state_);
    while (static_cast<int>(workers_.size()) < threads) {
      const int index = static_cast<int>(workers_.size());
      workers_.emplace_back([this, index, niceness, spared] { work(index, niceness, spared); });
      workers_.back().detach();
    }
    range_ = &range, items_ = items, size_ = size, wanted_ = running_ = threads;
    next_.store(0);
    ++call_;
    begin_.notify_all();
    end_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  static WorkerPool*& current() {
    static WorkerPool* pool = nullptr;  // never deleted: its threads may outlive the library's static objects
    return pool;
  }

  void work(int index, int niceness, int spared) {
#ifdef __linux__
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), niceness);
    spare_cores(spared);
#else
    (void)niceness, (void)spared;
#endif
    uint64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(state_);
      begin_.wait(lock, [&] { return call_ != seen && index < wanted_; });
      seen = call_;
      lock.unlock();
      for (int64_t begin; (begin = next_.fetch_add(size_)) < items_;)
        (*range_)(begin, begin + size_ < items_ ? begin + size_ : items_);
      lock.lock();
      if (--running_ == 0) end_.notify_one();
    }
  }

#ifdef __linux__
  // Numbers of cores that share a processor's units are neighbours on virtual machines.
  static void spare_cores(int spared) {
    cpu_set_t cores;
    if (spared <= 0 || sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) <= spared) return;
    for (int core = 0; core < CPU_SETSIZE && spared > 0; ++core)
      if (CPU_ISSET(core, &cores)) CPU_CLR(core, &cores), --spared;
    sched_setaffinity(0, sizeof cores, &cores);
  }
#endif

  std::mutex turn_, state_;
  std::condition_variable begin_, end_;
  std::vector<std::thread> workers_;
  std::atomic<int64_t> next_{0};
  const Range* range_ = nullptr;
  int64_t items_ = 0, size_ = 1;
  int wanted_ = 0, running_ = 0;
  uint64_t call_ = 0;
};
