"""Writes slides of the seven stages, one HTML file: python -m tools.pages.slides site/slides.html

Each stage has its columns, its command with the output, and the blocks of its diff with what falls
without their lines. The pages' prose is in the speaker's notes (press S). Everything is read from
docs/, so a changed diff changes its slide. `make slides` installs reveal.js and runs this.
"""

import argparse
import re
from html import escape
from pathlib import Path

import markdown
from pygments.formatters import HtmlFormatter

from tools.pages.diffs import format_lines, units_of_lines
from tools.pages.fences import changed_units, step_to
from tools.steps import ROOT, STAGES
from tools.units.stored import load

REVEAL = ROOT / ".venv" / "slides" / "sphinx_revealjs" / "_static" / "revealjs"
FENCE = r'<!-- \[\[\[cog fence\("(.+?)", "(.+?)"\) \]\]\] -->\n```'
GENERATED = r"<!-- \[\[\[cog .*?<!-- \[\[\[end\]\]\] -->"
MAX_HEIGHT = 22  # lines of code, and of what falls without them, on a slide
# Beside these lines stands no sentence: blank ones, comments, imports, and prose of a docstring.
NO_CODE = r'$|#|import |from |"""|The |`'
WIDTH = 100  # letters in such a line
SKIPPED = ("Write it yourself", "Exercises", "Try it")  # sections that a class has in another form
OPTIONS = """{
  width: 1280, height: 720, margin: 0.04, center: false, hash: true, transition: "none",
  slideNumber: "h.v", plugins: [RevealNotes],
}"""
STYLE = """
.reveal { font-size: 24px }
.reveal .slides { text-align: left }
.reveal h1, .reveal h2 { font-size: 1.6em; text-transform: none }
.reveal pre { width: 100%; margin: 0.4em 0; box-shadow: none }
.reveal pre code { font-size: 20px; line-height: 1.25; max-height: none; padding: 0 }
.reveal .line { display: block; white-space: pre; text-decoration: none }
.reveal ins.line { background: #dafbe1 } .reveal del.line { background: #ffebe9 }
.reveal .caption, .reveal .without { font-size: 20px; margin: 0.2em 0; line-height: 1.25 }
.reveal svg { height: 420px; width: auto } .reveal .later { opacity: 0.2 }
.reveal .command { background: #f6f8fa; padding: 0.4em } .reveal .output { color: #59636e }
.reveal .gap { color: #59636e }
"""


def sections(page):
    """Yields the sections of a page: a title, the file and unit of each block, and the prose."""
    title, *parts = re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    for part in [title.removeprefix("# "), *parts]:
        heading, _, text = part.partition("\n")
        prose = re.sub(f"{GENERATED}|<summary>.*?</summary>|<!--.*?-->", "", text, flags=re.DOTALL)
        prose = re.sub(r"</?details.*?>|!\[.*?\]\(.*?\)", "", prose, flags=re.DOTALL)
        prose = re.sub(r"\]\((\w+)\.md", r"](\1.html", prose)  # the site's pages, beside the slides
        yield heading, re.findall(FENCE, text), prose.strip()


def height(lines, sentences):
    return len(lines) + sum(1 + len(sentence) // WIDTH for sentence in sentences)


def sentence(line, without):
    """Returns what falls without a changed line."""
    code = f"<code>{escape(line[1:].partition('  # ')[0].strip(' :'))}</code>"
    return f"{'Without' if line[0] == '+' else 'With'} {code}: {escape(without)}"


def parts(file, unit, told):
    """Yields the parts of a block that fit on a slide: lines, their units, what falls without.

    Each sentence comes once, beside a line of code: `told` has the units that came before.
    """
    lines, units, sentences = [], [], []
    step = step_to(file)
    known = iter(units_of_lines(file)[unit] if step.base else [])
    for line in changed_units(step)[unit]:
        line = line if step.base else f" {line}"
        changed = line[0] in "+-"
        name = next(known, None) if changed else None
        new = []
        if name and name not in told and not re.match(NO_CODE, line[1:].strip()):
            new = [sentence(line, load()[file][int(name.rpartition(":")[2])]["without"])]
            told.add(name)
        if lines and height([*lines, line], sentences + new) > MAX_HEIGHT:
            yield lines, units, sentences
            lines, units, sentences = [], [], []
        lines.append(line or " ")
        sentences += new
        units += [name] if changed else []
    yield lines, units, sentences


def slide(content, notes=""):
    html = markdown.markdown(notes, extensions=["tables", "fenced_code"])
    return f'<section>{content}<aside class="notes">{html}</aside></section>'


def code_slides(heading, file, unit, notes, told):
    """Returns the slides of one block."""
    language = "python" if file.endswith(".py") else "bash"
    slides = []
    for lines, units, sentences in parts(file, unit, told):
        code = format_lines(lines, language, units)
        falls = "".join(f'<p class="without">{text}</p>' for text in sentences)
        slides.append(
            slide(
                f'<h2>{escape(heading)}</h2><p class="caption">{file} · {escape(unit)}</p>'
                f"<pre><code class='highlight'>{code}</code></pre>{falls}",
                notes,
            )
        )
        notes = ""  # said with the first of them
    return slides


def stage(file):
    """Returns the slides of one stage."""
    name = file.removesuffix(".py")
    (title, _, prose), *others = sections(f"{name}.md")
    columns = ""
    for shown in STAGES:
        picture = (ROOT / f"docs/assets/chain/{Path(shown).stem}.svg").read_text()
        later = STAGES.index(shown) > STAGES.index(file)
        columns += f'<span class="{"later" if later else ""}">{picture}</span>'
    intro = markdown.markdown(prose.partition("\n\n")[0])
    slides = [slide(f"<h1>{escape(title)}</h1>{intro}<p>{columns}</p>", prose)]
    slides.append(slide(f"<h2>Run it</h2>{commands(prose)}"))
    told = set()
    for heading, blocks, notes in others:
        units = [unit for block, unit in blocks if block == file and unit != "docstring"]
        for unit in units:
            slides += code_slides(heading, file, unit, notes, told)
            notes = ""
        if not blocks and heading not in SKIPPED:
            intro = markdown.markdown(notes.partition("\n\n")[0])
            slides.append(slide(f"<h2>{escape(heading)}</h2>{intro}{commands(notes)}", notes))
    return f"<section>{''.join(slides)}</section>"


def commands(prose):
    """Returns the first command of a section, and its output, cut to what fits."""
    html = ""
    for kind, look in (("sh", "command"), ("text", "output")):
        found = re.search(f"^```{kind}\n(.*?)^```", prose, re.DOTALL | re.MULTILINE)
        if found:
            text = "\n".join(found[1].splitlines()[: MAX_HEIGHT // 2])
            html += f'<pre class="{look}"><code>{escape(text)}</code></pre>'
    return html


def page():
    """Returns the HTML of all slides."""
    styles = [(REVEAL / "dist" / name).read_text() for name in ("reveal.css", "theme/white.css")]
    styles = re.sub(r"@import url\(.*?\);?", "", "".join(styles))  # fonts from elsewhere
    colors = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    scripts = [(REVEAL / name).read_text() for name in ("dist/reveal.js", "plugin/notes/notes.js")]
    stages = "".join(map(stage, STAGES))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Distributed PyTorch training, by diffs</title>
<style>{styles}{colors}{STYLE}</style></head>
<body><div class="reveal"><div class="slides">{stages}</div></div>
<script>{"</script><script>".join(scripts)}</script>
<script>Reveal.initialize({OPTIONS})</script></body></html>
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the HTML file to write")
    path = parser.parse_args().path
    if not REVEAL.exists():
        parser.error("reveal.js is missing: start it by make slides, which installs it")
    path.parent.mkdir(exist_ok=True)
    path.write_text(page())
    print(f"{path}: open it in a browser; S shows the speaker's notes")


if __name__ == "__main__":
    main()
