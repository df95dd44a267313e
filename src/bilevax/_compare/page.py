"""One HTML page that needs nothing beside it."""

import html

from .tables import to_html

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1e23; --paper: #fdfdfb; --rule: #d9d9d4;
  --soft: #5b6068; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e1; --paper: #16181c; --rule: #3a3d43; --soft: #a2a6ad; } }
* { box-sizing: border-box; }
body { font: 17px/1.55 Charter, "Iowan Old Style", Georgia, serif; color: var(--ink);
  background: var(--paper); max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; font-weight: 600; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; font-weight: 600; }
p, ul { max-width: 42rem; }
li { margin: .25rem 0; }
.note { color: var(--soft); font-size: .88em; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font: .78rem/1.4 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 1.5px solid var(--ink); vertical-align: bottom; }
td { border-bottom: 1px solid var(--rule); vertical-align: top; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; }
th.r, td.r { text-align: right; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; color: var(--ink); }
svg text { font-family: system-ui, sans-serif !important; }
"""

_RULES = (
    "All methods start at the same points and draw the same tilts, segment points, "
    "samples and directions: a seed fixes them.",
    "F is evaluated with the lower level unperturbed and solved exactly, whatever the "
    "method itself works with.",
    "The gap is (F - F best) / (F start - F best); F best is the lowest value of any "
    "method on that problem and seed, or a known target if that is lower.",
    "Lower-level solves in curves and profiles include solves of penalised, barrier "
    "and saddle problems; a step without any solve is charged one.",
    "Seconds are those of the steps alone: compilation, measuring of scales and looks "
    "at F are left out; the first is in the table of results.",
    "Costs to a target are seen at looks only, and are medians over all runs; a dash "
    "says that half of the runs or more never came there.",
    "A profile shows on which share of problems and seeds a method needs at most so "
    "many times the cost of the cheapest method there. Runs that failed or were "
    "refused never arrive.",
)


def page(title: str, intro: str, rows: list[dict], parts: list[tuple[str, str]]) -> str:
    """`parts` are headings with HTML below them."""
    body = "\n".join(f"<h2>{html.escape(name)}</h2>\n{text}" for name, text in parts)
    rules = "\n".join(f"<li>{html.escape(rule)}</li>" for rule in _RULES)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(intro)}</p>
<p class="note">{html.escape(setting(rows))}</p>
{body}
<h2>How it was measured</h2>
<ul>
{rules}
</ul>
</body>
</html>
"""


def setting(rows: list[dict]) -> str:
    """How many runs, within which budget, tuned how, on which machine."""
    count = lambda name: len({row[name] for row in rows})
    first = rows[0]
    budget = first["budget"]
    limits = [f"{budget['steps']} iterations"]
    if budget["lower_solves"] is not None:
        limits.append(f"{budget['lower_solves']} lower-level solves")
    if budget["seconds"] is not None:
        limits.append(f"{budget['seconds']:g} seconds")
    tuned = next((row["tuning"] for row in rows if row["tuning"]), None)
    steps = "Methods ran with their own defaults."
    if tuned:
        grid = tuned["grid"]
        steps = (
            f"Every method tried {len(grid)} steps from {grid[0]:g} to {grid[-1]:g} on "
            "seeds that are not counted, and ran with its best."
        )
    return (
        f"{count('method')} methods on {count('problem')} problems, {count('seed')} "
        f"seeds; at most {', '.join(limits)} per run, a look at F every "
        f"{budget['look_every']}. {steps} JAX {first['jax']} on {first['device']}."
    )


def figure(svg: str) -> str:
    return f"<figure class='wide' style='margin:0'>{svg}</figure>"


def table(rows: list[dict]) -> str:
    return f"<div class='wide'>{to_html(rows)}</div>"
