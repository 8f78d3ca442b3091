// The portable operator: AdamW with 8-bit or fp32 moments, the codec alone, and the sum of squares, as a plain C ABI.
//
// No intrinsics: every inner loop is written so that a compiler vectorises it (one element type at a time, integer
// maxima instead of float ones, runs padded to a multiple of 32 lanes). Formulas: codec.py, adamw.py, norm.py.
// Build without contraction of multiply-adds and without fast-math (native.py): then all paths give the same bits.
// All pointers may be aligned to their element only. No function but the last keeps state, so any number of threads may
// call them on disjoint ranges; lt_run_ranges does so with threads of its own.

#include <stdint.h>

#include <cmath>
#include <cstring>

#include "worker_pool.h"

// GCC and Clang spell it alike; a loop of literal length 128 needs the call inlined.
#define ALWAYS_INLINE __attribute__((always_inline)) inline
#define ALWAYS_INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int ABI_VERSION = 4;
constexpr int GROUP = 128;
constexpr int PAD = 32;            // math runs on whole multiples of this many lanes
constexpr int SQUARE_LANES = 1024;  // norm.py: lanes of a tile
constexpr int SQUARE_ROWS = 64;     // norm.py: rows of a tile
constexpr uint32_t GROUP_STEP = 0xC13FA9A9u;
const float DECODE_M = static_cast<float>(1.0 / 16129.0);
const float DECODE_R = static_cast<float>(1.0 / 255.0);
const float SCALE_FLOOR = static_cast<float>(1e-30);

enum Weights { WEIGHTS_FP32 = 0, WEIGHTS_32 = 1, WEIGHTS_24 = 2 };
enum Floats { FP32 = 0, BF16 = 1 };

struct Scalars {  // the same order as native.py's
  float coef, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, decay, step_size;
  uint32_t dither;
};

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int padded(int count) { return (count + PAD - 1) / PAD * PAD; }

inline void clear_tail(float* x, int count) {
  for (int i = count, end = padded(count); i < end; ++i) x[i] = 0.0f;
}

inline void load_floats(int kind, const void* from, int64_t at, int count, float* __restrict__ out) {
  if (kind == BF16) {
    const uint16_t* __restrict__ x = static_cast<const uint16_t*>(from) + at;
    for (int i = 0; i < count; ++i) out[i] = as_float(static_cast<uint32_t>(x[i]) << 16);
  } else {
    std::memcpy(out, static_cast<const float*>(from) + at, sizeof(float) * count);
  }
}

inline void load_weights(int kind, const void* weights, const void* lo, int64_t at, int count, float* __restrict__ w) {
  if (kind == WEIGHTS_FP32) {
    std::memcpy(w, static_cast<const float*>(weights) + at, sizeof(float) * count);
    return;
  }
  const uint16_t* __restrict__ hi = static_cast<const uint16_t*>(weights) + at;
  if (kind == WEIGHTS_32) {
    const int16_t* __restrict__ low = static_cast<const int16_t*>(lo) + at;
    for (int i = 0; i < count; ++i)
      w[i] = as_float((static_cast<uint32_t>(hi[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low[i])));
  } else {
    const int8_t* __restrict__ low = static_cast<const int8_t*>(lo) + at;
    for (int i = 0; i < count; ++i)
      w[i] = as_float((static_cast<uint32_t>(hi[i]) << 16) + (static_cast<uint32_t>(static_cast<int32_t>(low[i])) << 8));
  }
}

inline void store_weights(int kind, void* weights, void* lo, int64_t at, int count, uint32_t dither,
                          const float* __restrict__ w) {
  if (kind == WEIGHTS_FP32) {
    std::memcpy(static_cast<float*>(weights) + at, w, sizeof(float) * count);
    return;
  }
  uint16_t* __restrict__ hi = static_cast<uint16_t*>(weights) + at;
  if (kind == WEIGHTS_32) {
    int16_t* __restrict__ low = static_cast<int16_t*>(lo) + at;
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = as_bits(w[i]);
      const uint32_t high = (bits + 0x8000u) >> 16;
      hi[i] = static_cast<uint16_t>(high);
      low[i] = static_cast<int16_t>(bits - (high << 16));
    }
  } else {
    int8_t* __restrict__ low = static_cast<int8_t*>(lo) + at;
    const uint32_t round = dither & 0xFFu;
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = (as_bits(w[i]) + round) >> 8;
      const uint32_t high = (bits + 0x80u) >> 8;
      hi[i] = static_cast<uint16_t>(high);
      low[i] = static_cast<int8_t>(bits - (high << 8));
    }
  }
}

// codes -> m and r = sqrt(v)
inline void decode(const int8_t* __restrict__ m_q, float m_scale, const uint8_t* __restrict__ v_q, float v_scale,
                   int count, float* __restrict__ m, float* __restrict__ r) {
  const float to_m = m_scale * DECODE_M, to_r = v_scale * DECODE_R;
  for (int i = 0; i < count; ++i) {
    const int32_t q = m_q[i];
    m[i] = static_cast<float>(q * (q < 0 ? -q : q)) * to_m;
  }
  for (int i = 0; i < count; ++i) r[i] = static_cast<float>(static_cast<int32_t>(v_q[i])) * to_r;
}

// The largest |m| and r as bit patterns: floats of one sign are ordered like their bits, and integer maxima vectorise.
struct Tops {
  int32_t m = 0, r = 0;

  void raise(float new_m, float new_r) {
    const int32_t abs_m = static_cast<int32_t>(as_bits(new_m) & 0x7FFFFFFFu);
    const int32_t abs_r = static_cast<int32_t>(as_bits(new_r));
    m = m > abs_m ? m : abs_m;
    r = r > abs_r ? r : abs_r;
  }
};

// m and r = sqrt(v) -> codes and scales; buffers hold zeros up to padded(count)
inline void encode(const float* __restrict__ m, const float* __restrict__ r, Tops tops, int count, uint32_t dither,
                   int8_t* __restrict__ m_q, float* m_scale, uint8_t* __restrict__ v_q, float* v_scale) {
  const int lanes = padded(count);
  const float top_m = as_float(static_cast<uint32_t>(tops.m)), top_r = as_float(static_cast<uint32_t>(tops.r));
  const float s_m = top_m > SCALE_FLOOR ? top_m : SCALE_FLOOR, s_r = top_r > SCALE_FLOOR ? top_r : SCALE_FLOOR;
  const float from_m = 16129.0f / s_m, from_r = 255.0f / s_r;
  const float rho = static_cast<float>(static_cast<int32_t>(dither >> 8)) * (1.0f / 16777216.0f);
  alignas(64) int32_t q[GROUP], c[GROUP];
  for (int i = 0; i < lanes; ++i) {
    const float size = std::sqrt(std::fabs(m[i]) * from_m) + 0.5f;
    q[i] = static_cast<int32_t>(as_float(as_bits(size) | (as_bits(m[i]) & 0x80000000u)));  // m's sign; int() cuts
    const int32_t code = static_cast<int32_t>(r[i] * from_r + rho);
    const int32_t least = r[i] > 0.0f ? 1 : 0;  // v > 0 never decodes to 0: m / eps would be thousands of steps
    const int32_t capped = code < 255 ? code : 255;
    c[i] = capped > least ? capped : least;
  }
  for (int i = 0; i < count; ++i) m_q[i] = static_cast<int8_t>(q[i]);
  for (int i = 0; i < count; ++i) v_q[i] = static_cast<uint8_t>(c[i]);
  *m_scale = s_m;
  *v_scale = s_r;
}

// One AdamW step on whole lanes: w and m in place. v_or_r is v (fp32 moments) or, for codes, its root before and after.
template <bool ROOTS>
ALWAYS_INLINE Tops step_lanes(const Scalars& s, int lanes, const float* __restrict__ g, float* __restrict__ w,
                              float* __restrict__ m, float* __restrict__ v_or_r) {
  Tops tops;
  for (int i = 0; i < lanes; ++i) {
    const float grad = s.coef * g[i];
    const float v_old = ROOTS ? v_or_r[i] * v_or_r[i] : v_or_r[i];
    const float m_new = s.beta1 * m[i] + s.one_minus_beta1 * grad;
    const float v_new = s.beta2 * v_old + s.one_minus_beta2 * (grad * grad);
    const float root = std::sqrt(v_new);
    const float u = m_new / (root * s.inv_sqrt_bias2 + s.eps);
    w[i] = w[i] * s.decay - s.step_size * u;
    m[i] = m_new;
    v_or_r[i] = ROOTS ? root : v_new;
    if (ROOTS) tops.raise(m_new, root);
  }
  return tops;
}

struct States8 {
  int8_t* m_q;
  float* m_scale;
  uint8_t* v_q;
  float* v_scale;
};

// Calls body(at, group, count) for each group of [begin, end); count is the literal GROUP for all but ragged ones.
template <class Body>
ALWAYS_INLINE void for_groups(int64_t cols, int64_t begin, int64_t end, const Body& body) {
  if (begin >= end) return;
  const int64_t full = cols / GROUP, tail = cols % GROUP, groups_per_row = full + (tail > 0);
  int64_t in_row = begin % groups_per_row, at = begin / groups_per_row * cols + in_row * GROUP, group = begin;
  while (group < end) {
    const int64_t stop = end - group < full - in_row ? end : group + full - in_row;
    for (; group < stop; ++group, at += GROUP) body(at, group, GROUP);
    if (tail > 0 && group < end) {
      body(at, group, static_cast<int>(tail));
      ++group;
      at += tail;
    }
    in_row = 0;
  }
}

// The kinds are template arguments because choosing between loops inside a group costs a tenth of the speed.
template <int WEIGHTS, int GRADS>
void adamw8bit_range(void* weights, void* lo, const States8& states, const void* grads, int64_t cols, int64_t begin,
                     int64_t end, const Scalars s) {
  for_groups(cols, begin, end, [&](int64_t at, int64_t group, int count) ALWAYS_INLINE_LAMBDA {
    alignas(64) float w[GROUP], g[GROUP], m[GROUP], r[GROUP];
    const uint32_t dither = s.dither + static_cast<uint32_t>(group) * GROUP_STEP;
    load_weights(WEIGHTS, weights, lo, at, count, w);
    load_floats(GRADS, grads, at, count, g);
    decode(states.m_q + at, states.m_scale[group], states.v_q + at, states.v_scale[group], count, m, r);
    clear_tail(w, count), clear_tail(g, count), clear_tail(m, count), clear_tail(r, count);
    const Tops tops = step_lanes<true>(s, padded(count), g, w, m, r);
    store_weights(WEIGHTS, weights, lo, at, count, dither, w);
    encode(m, r, tops, count, dither, states.m_q + at, states.m_scale + group, states.v_q + at, states.v_scale + group);
  });
}

template <int WEIGHTS, int GRADS>
void adamw_range(void* weights, void* lo, float* m, float* v, const void* grads, int64_t numel, int64_t begin,
                 int64_t end, const Scalars s) {
  for_groups(numel, begin, end, [&](int64_t at, int64_t group, int count) ALWAYS_INLINE_LAMBDA {
    alignas(64) float w[GROUP], g[GROUP], m_new[GROUP], v_new[GROUP];
    load_weights(WEIGHTS, weights, lo, at, count, w);
    load_floats(GRADS, grads, at, count, g);
    load_floats(FP32, m, at, count, m_new);
    load_floats(FP32, v, at, count, v_new);
    clear_tail(w, count), clear_tail(g, count), clear_tail(m_new, count), clear_tail(v_new, count);
    step_lanes<false>(s, padded(count), g, w, m_new, v_new);
    store_weights(WEIGHTS, weights, lo, at, count, s.dither + static_cast<uint32_t>(group) * GROUP_STEP, w);
    std::memcpy(m + at, m_new, sizeof(float) * count);
    std::memcpy(v + at, v_new, sizeof(float) * count);
  });
}

inline float widened(float x) { return x; }
inline float widened(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

inline float square(float x) { return x * x; }

// The squares of four rows, added as norm.py defines it; row after row, as memory is fetched ahead.
template <typename T>
ALWAYS_INLINE void add_squares(const T* __restrict__ x, float* __restrict__ sums) {
  alignas(64) float left[SQUARE_LANES], right[SQUARE_LANES];
  for (int j = 0; j < SQUARE_LANES; ++j) left[j] = square(widened(x[j]));
  for (int j = 0; j < SQUARE_LANES; ++j) left[j] += square(widened(x[j + SQUARE_LANES]));
  for (int j = 0; j < SQUARE_LANES; ++j) right[j] = square(widened(x[j + 2 * SQUARE_LANES]));
  for (int j = 0; j < SQUARE_LANES; ++j) sums[j] += left[j] + (right[j] + square(widened(x[j + 3 * SQUARE_LANES])));
}

// adjacent pairs, as norm.py defines it
inline double fold(double* x) {
  for (int n = SQUARE_LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = x[2 * i] + x[2 * i + 1];
  return x[0];
}

template <typename T>
void square_tiles(const T* x, int64_t numel, int64_t begin, int64_t end, double* values) {
  constexpr int FOUR = 4 * SQUARE_LANES;
  alignas(64) float sums[SQUARE_LANES];
  alignas(64) double lanes[SQUARE_LANES];
  for (int64_t tile = begin; tile < end; ++tile) {
    std::memset(sums, 0, sizeof sums);
    const int64_t first = tile * SQUARE_ROWS * SQUARE_LANES;
    for (int64_t at = first; at < first + SQUARE_ROWS * SQUARE_LANES && at < numel; at += FOUR) {
      if (numel - at >= FOUR) {
        add_squares(x + at, sums);
      } else {
        alignas(64) T last[FOUR] = {};
        std::memcpy(last, x + at, sizeof(T) * (numel - at));
        add_squares(last, sums);
      }
    }
    for (int j = 0; j < SQUARE_LANES; ++j) lanes[j] = sums[j];
    values[tile] = fold(lanes);
  }
}

}  // namespace

extern "C" {

int lt_abi_version() { return ABI_VERSION; }

void lt_adamw8bit(int weights_kind, int grads_kind, void* weights, void* lo, int8_t* m_q, float* m_scale, uint8_t* v_q,
                  float* v_scale, const void* grads, int64_t cols, int64_t begin, int64_t end, const Scalars* scalars) {
  static constexpr decltype(&adamw8bit_range<0, 0>) RANGES[3][2] = {
      {adamw8bit_range<WEIGHTS_FP32, FP32>, adamw8bit_range<WEIGHTS_FP32, BF16>},
      {adamw8bit_range<WEIGHTS_32, FP32>, adamw8bit_range<WEIGHTS_32, BF16>},
      {adamw8bit_range<WEIGHTS_24, FP32>, adamw8bit_range<WEIGHTS_24, BF16>}};
  const States8 states = {m_q, m_scale, v_q, v_scale};
  RANGES[weights_kind][grads_kind](weights, lo, states, grads, cols, begin, end, *scalars);
}

// begin and end count groups of 128 of a flat tensor of numel elements
void lt_adamw(int weights_kind, int grads_kind, void* weights, void* lo, float* m, float* v, const void* grads,
              int64_t numel, int64_t begin, int64_t end, const Scalars* scalars) {
  static constexpr decltype(&adamw_range<0, 0>) RANGES[3][2] = {
      {adamw_range<WEIGHTS_FP32, FP32>, adamw_range<WEIGHTS_FP32, BF16>},
      {adamw_range<WEIGHTS_32, FP32>, adamw_range<WEIGHTS_32, BF16>},
      {adamw_range<WEIGHTS_24, FP32>, adamw_range<WEIGHTS_24, BF16>}};
  RANGES[weights_kind][grads_kind](weights, lo, m, v, grads, numel, begin, end, *scalars);
}

void lt_quantize(const float* m, const float* v, int8_t* m_q, float* m_scale, uint8_t* v_q, float* v_scale, int64_t cols,
                 int64_t begin, int64_t end, uint32_t dither) {
  alignas(64) float m_in[GROUP], r[GROUP];
  for_groups(cols, begin, end, [&](int64_t at, int64_t group, int count) {
    load_floats(FP32, m, at, count, m_in);
    load_floats(FP32, v, at, count, r);
    clear_tail(m_in, count), clear_tail(r, count);
    for (int i = 0, lanes = padded(count); i < lanes; ++i) r[i] = std::sqrt(r[i]);
    Tops tops;
    for (int i = 0, lanes = padded(count); i < lanes; ++i) tops.raise(m_in[i], r[i]);
    encode(m_in, r, tops, count, dither + static_cast<uint32_t>(group) * GROUP_STEP, m_q + at, m_scale + group, v_q + at,
           v_scale + group);
  });
}

void lt_dequantize(const int8_t* m_q, const float* m_scale, const uint8_t* v_q, const float* v_scale, float* m, float* v,
                   int64_t cols, int64_t begin, int64_t end) {
  alignas(64) float m_out[GROUP], r[GROUP];
  for_groups(cols, begin, end, [&](int64_t at, int64_t group, int count) {
    decode(m_q + at, m_scale[group], v_q + at, v_scale[group], count, m_out, r);
    std::memcpy(m + at, m_out, sizeof(float) * count);
    for (int i = 0; i < count; ++i) v[at + i] = r[i] * r[i];
  });
}

// begin and end count tiles of 64 x 1024 elements; one double each
void lt_square_tiles(int kind, const void* x, int64_t numel, int64_t begin, int64_t end, double* values) {
  if (kind == BF16) return square_tiles(static_cast<const uint16_t*>(x), numel, begin, end, values);
  square_tiles(static_cast<const float*>(x), numel, begin, end, values);
}

// One operator over a range: which one, its element types, its tensors in the order of its function above, and the rest.
struct Call {
  int32_t op, weights_kind, grads_kind;
  uint32_t dither;
  void* tensors[7];
  int64_t cols;  // or numel
  const Scalars* scalars;
};

enum Op { ADAMW8BIT, ADAMW, QUANTIZE, DEQUANTIZE, SQUARE_TILES };

static void run_range(const Call& c, int64_t begin, int64_t end) {
  void* const* t = c.tensors;
  switch (c.op) {
    case ADAMW8BIT:
      return lt_adamw8bit(c.weights_kind, c.grads_kind, t[0], t[1], static_cast<int8_t*>(t[2]), static_cast<float*>(t[3]),
                          static_cast<uint8_t*>(t[4]), static_cast<float*>(t[5]), t[6], c.cols, begin, end, c.scalars);
    case ADAMW:
      return lt_adamw(c.weights_kind, c.grads_kind, t[0], t[1], static_cast<float*>(t[2]), static_cast<float*>(t[3]), t[4],
                      c.cols, begin, end, c.scalars);
    case QUANTIZE:
      return lt_quantize(static_cast<float*>(t[0]), static_cast<float*>(t[1]), static_cast<int8_t*>(t[2]),
                         static_cast<float*>(t[3]), static_cast<uint8_t*>(t[4]), static_cast<float*>(t[5]), c.cols, begin,
                         end, c.dither);
    case DEQUANTIZE:
      return lt_dequantize(static_cast<int8_t*>(t[0]), static_cast<float*>(t[1]), static_cast<uint8_t*>(t[2]),
                           static_cast<float*>(t[3]), static_cast<float*>(t[4]), static_cast<float*>(t[5]), c.cols, begin,
                           end);
    case SQUARE_TILES:
      return lt_square_tiles(c.grads_kind, t[0], c.cols, begin, end, static_cast<double*>(t[1]));
  }
}

// The call over [0, items) in pieces of `size`: on the caller's thread, or on so many of the pool's (see there).
void lt_run_ranges(const Call* call, int64_t items, int64_t size, int threads, int niceness, int spared) {
  if (threads <= 1 || items <= size) return run_range(*call, 0, items);
  WorkerPool::instance().run(items, size, threads, niceness, spared,
                             [call](int64_t begin, int64_t end) { run_range(*call, begin, end); });
}

double lt_square_total(const double* values, int64_t count) {
  alignas(64) double lanes[SQUARE_LANES] = {};
  for (int64_t at = 0; at < count; at += SQUARE_LANES) {
    const int64_t row = count - at < SQUARE_LANES ? count - at : SQUARE_LANES;
    for (int64_t j = 0; j < row; ++j) lanes[j] += values[at + j];
  }
  return fold(lanes);
}

}  // extern "C"
