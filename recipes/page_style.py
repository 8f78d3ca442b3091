"""The style of report.html: light and dark by the reader's own choice, from 360 px to wide screens."""

PAGE_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d8dee4;--card:#f6f8fa;--main:#1f6feb;--second:#c2571a;
--faint:#9fc3f5;--good:#1a7f37;--bad:#c93c37;--unsure:#9a6700;
--forward:#4477aa;--backward:#225588;--head:#4fb3cf;--embed:#8fcbe8;--update:#e0586a;--load:#228833;--fetch:#7fae48;
--store:#b5a42c;--offload:#aa8833;--spill:#aa3377;--other:#9a9a9a;--idle:#c4c9cf}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e3e8ee;--dim:#98a3ae;--line:#2f3741;--card:#171d24;
--main:#6aa8ff;--second:#f0986a;--faint:#34527c;--good:#57c770;--bad:#ff7b72;--unsure:#e3b341;
--forward:#6f9fd0;--backward:#3f7ab8;--head:#66ccee;--embed:#99ddff;--update:#f0808e;--load:#4fb55f;--fetch:#9ccc66;
--store:#d8c650;--offload:#c9a550;--spill:#d06aa5;--other:#8a8f96;--idle:#4a525c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1200px;margin:0 auto;padding:16px}
h1{font-size:1.6rem;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:0 0 .6em}h3{font-size:1rem;margin:1em 0 .3em}
p{margin:.6em 0}.none{color:var(--dim)}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;margin:16px 0;min-width:0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:8px 16px;margin:0}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.chart{display:grid;grid-template-columns:3.2em minmax(0,1fr);margin:0}
.chart .legend,.chart figcaption{grid-column:2}.chart svg{width:100%;height:240px;display:block}
.y,.x{position:relative;font-size:.75rem;color:var(--dim)}
.y span{position:absolute;right:.6em;transform:translateY(-50%)}
.chart .x{grid-column:2}.x{height:1.6em}.x span{position:absolute;transform:translateX(-50%);white-space:nowrap}
figcaption{text-align:center;font-size:.75rem;color:var(--dim)}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.line{fill:none;stroke-width:1.6;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.s-main{stroke:var(--main);background:var(--main)}.s-second{stroke:var(--second);background:var(--second)}
.s-faint{stroke:var(--faint);background:var(--faint)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.8rem;margin-bottom:6px}
i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.queue{display:grid;grid-template-columns:5.6em minmax(0,1fr);align-items:center;font-size:.8rem;margin:2px 0}
.queue svg{width:100%;height:22px;display:block;background:var(--bg)}
.shares{width:100%;height:28px;display:block}
.bar{display:grid;grid-template-columns:5.6em minmax(0,1fr) 6.5em;gap:8px;align-items:center;font-size:.8rem}
.bar div{background:var(--bg);height:16px;border-radius:3px;overflow:hidden}.bar b{display:block;height:100%}
.b-main{background:var(--main)}.b-second{background:var(--second)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:3px 16px 3px 0;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}
@media(max-width:480px){table{font-size:.78rem}th,td{padding-right:9px}}
details{border-left:3px solid var(--dim);padding:2px 0 2px 10px;margin:6px 0}
summary{cursor:pointer;overflow-wrap:anywhere}
.v-correct{border-color:var(--good)}.v-wrong{border-color:var(--bad)}.v-no_answer{border-color:var(--unsure)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--bg);padding:8px;border-radius:4px;font-size:.8rem}
"""

WORK = ("forward", "backward", "head", "embed", "update", "load", "fetch", "store", "offload", "spill", "other")
# In the order of the account: forward, backward, head, update, other, then what was waited for, then idle.
PARTS = ("forward", "backward", "head", "update", "other", "load", "offload", "spill", "store", "idle")
PAGE_STYLE += "".join(f".f-{w}{{fill:var(--{w});background:var(--{w})}}\n" for w in WORK)
PAGE_STYLE += "".join(f".part-{i}{{fill:var(--{w});background:var(--{w})}}\n" for i, w in enumerate(PARTS))
