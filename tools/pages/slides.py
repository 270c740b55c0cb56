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

from tools.pages.diffs import answers, format_lines, units_of_lines
from tools.pages.extension import COG_FENCE
from tools.pages.fences import changed_units, step_to
from tools.steps import ROOT, STAGES

REVEAL = ROOT / ".venv" / "slides" / "sphinx_revealjs" / "_static" / "revealjs"
END = "<!-- [[[end]]] -->"
MAX_HEIGHT = 21  # lines of code, and of what falls without them, on a slide
WIDTH = 100  # letters in such a line
OPTIONS = """{
  width: 1280, height: 720, margin: 0.04, center: false, hash: true, transition: "none",
  plugins: [RevealNotes],
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
.reveal svg { height: 500px; width: auto }
.reveal .gap { color: #59636e }
"""


def sections(page):
    """Yields the sections of a page: a title, the file and unit of each block, and the prose."""
    title, *parts = re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    for part in [title.removeprefix("# "), *parts]:
        heading, _, text = part.partition("\n")
        blocks = re.findall(COG_FENCE, text)
        prose = re.sub(rf"{COG_FENCE}.*?{re.escape(END)}", "", text, flags=re.DOTALL)
        prose = re.sub(
            r"^```.*?^```|<.*?>|!\[.*?\]\(.*?\)", "", prose, flags=re.DOTALL | re.MULTILINE
        )
        yield heading, blocks, prose.strip()


def height(lines, sentences):
    return len(lines) + sum(2 + len(sentence) // WIDTH for sentence in sentences)


def sentence(lines, without):
    """Returns what falls without changed lines, of which it names the first."""
    line = next((line for line in lines if line[0] == "+"), lines[0])
    code = f"<code>{escape(line[1:].partition('  # ')[0].strip(' :'))}</code>"
    return f"{'Without' if line[0] == '+' else 'With'} {code}: {escape(without)}"


def parts(file, unit):
    """Yields the parts of a block that fit on a slide: lines, their units, what falls without."""
    lines, units, sentences = [], [], {}
    step = step_to(file)
    known = iter(units_of_lines(file)[unit] if step.base else [])
    for line in changed_units(step)[unit]:
        line = line if step.base else f" {line}"
        changed = line[0] in "+-"
        name = next(known, None) if changed else None
        new = {}
        if name and name not in sentences:
            answer = answers()[file][int(name.rpartition(":")[2])]
            new = {name: sentence(answer["lines"], answer["without"])}
        if lines and height([*lines, line], [*sentences.values(), *new.values()]) > MAX_HEIGHT:
            yield lines, units, sentences.values()
            lines, units, sentences = [], [], {}
        lines.append(line or " ")
        sentences |= new
        units += [name] if changed else []
    yield lines, units, sentences.values()


def slide(content, notes=""):
    html = markdown.markdown(notes, extensions=["tables"])
    return f'<section>{content}<aside class="notes">{html}</aside></section>'


def code_slides(heading, file, unit, notes):
    """Returns the slides of one block."""
    language = "python" if file.endswith(".py") else "bash"
    slides = []
    for lines, units, sentences in parts(file, unit):
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
    text = (ROOT / "docs" / f"{name}.md").read_text()
    (title, _, prose), *others = sections(f"{name}.md")
    shown = [step_to(file).base, file] if step_to(file).base else [file]
    columns = [(ROOT / f"docs/assets/chain/{Path(f).stem}.svg").read_text() for f in shown]
    intro = markdown.markdown(prose.partition("\n\n")[0])
    slides = [slide(f"<h1>{escape(title)}</h1>{intro}<p>{''.join(columns)}</p>", prose)]
    run = ""
    for kind in ("sh", "text"):
        first = re.search(f"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        run += f"<pre><code>{escape(first[1])}</code></pre>"
    slides.append(slide(f"<h2>Run it</h2>{run}"))
    for heading, blocks, notes in others:
        for block_file, unit in blocks:
            if block_file == file and unit != "docstring":
                slides += code_slides(heading, file, unit, notes)
                notes = ""
    return f"<section>{''.join(slides)}</section>"


def page():
    """Returns the HTML of all slides."""
    styles = [(REVEAL / "dist" / name).read_text() for name in ("reveal.css", "theme/white.css")]
    styles = [
        re.sub(r"@import url\(.*?\);?", "", style) for style in styles
    ]  # fonts from elsewhere
    colors = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    scripts = [(REVEAL / name).read_text() for name in ("dist/reveal.js", "plugin/notes/notes.js")]
    stages = "".join(map(stage, STAGES))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Distributed PyTorch training, by diffs</title>
<style>{"".join(styles)}{colors}{STYLE}</style></head>
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
