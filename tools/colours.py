"""Colours a ```diff fence: red and green bands, and within them the colours of its language.

mkdocs.yml names `format_diff`; cog prints `styles` into docs/assets/series.css.
"""

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

STYLES = {"default": "xcode", "slate": "github-dark"}  # for light and dark, legible on the bands
TAGS = {"+": "ins", "-": "del", " ": "span"}


def highlight_lines(lines, language):
    """Returns the HTML of each line of a piece of code, which may begin inside a docstring."""
    inside = "".join(lines).count('"""') % 2 and '"""' not in lines[0]
    lexer = get_lexer_by_name(language, stripnl=False)
    text = "\n".join(['"""', *lines] if inside else lines)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")[bool(inside) :]


def format_diff(source, language, css_class, options, md, **kwargs):
    """Returns the HTML of a fence, as pymdownx.superfences asks a custom fence to do."""
    lines = [line or " " for line in source.split("\n")]  # where an empty line has lost its blank
    code = options.get("lang", "python")
    sides = {
        "+": iter(highlight_lines([line[1:] for line in lines if line[:1] in " +"], code)),
        "-": iter(highlight_lines([line[1:] for line in lines if line[:1] in " -"], code)),
    }
    rows = []
    for line in lines:
        if line.startswith("@@"):
            rows.append('<span class="gap">⋯</span>')
            continue
        sign = line[0]
        for side in "+-":  # a line of context is in both
            if sign in (side, " "):
                shown = next(sides[side])
        rows.append(f'<{TAGS[sign]} class="line"><b>{sign}</b>{shown}\n</{TAGS[sign]}>')
    return f'<div class="diff" tabindex="0"><pre><code>{"".join(rows)}</code></pre></div>'


def check_options(language, inputs, options, attrs, md):
    """Tells superfences that a fence may say in which language its two sides are."""
    options.update(inputs)
    return set(inputs) <= {"lang"}


def styles():
    """Prints the style sheet of the colours."""
    for scheme, style in STYLES.items():
        formatter = HtmlFormatter(style=style)
        rules = formatter.get_token_style_defs(f'[data-md-color-scheme="{scheme}"] .diff')
        print(*rules, sep="\n")
