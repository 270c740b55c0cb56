"""An extension of Markdown, which mkdocs.yml names: what the pages have that is not written there.

It tells each fence that cog fills its file and unit, appends the whole files to the page, and puts
the reading time below the page's title and, in the sidebar, the script's name. Into docs/diff.md,
docs/compose.md, docs/watch.md and docs/choose.md it puts what their JavaScript needs. It also keeps
lines from ending within an option.
"""

import re

from markdown import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor
from rankcheck.rules import FOLDER

from tools.pages.check_docs import reading_time
from tools.pages.diffs import format_file, format_units, link_to_diff
from tools.pages.widgets import CHOICES, format_recording

INLINE_CODE = re.compile(r"(?<=<code>)(?<!</span><code>)[^<]+(?=</code>)")  # not in a block
COG_FENCE = r'<!-- \[\[\[cog fence\("(.+)", "(.+)"\) \]\]\] -->\n```'
RECORDING = r"<!-- watch (.*?\.py), (.*) -->"
PLAYER = '<script src="{0}assets/unpack.js"></script><script src="{0}assets/watch.js"></script>'


class Sources(Preprocessor):
    """Names the file and the unit of each block, and appends the files that a page has diffs of."""

    def run(self, lines):
        """Returns the lines of a page, with what they lack."""
        text = "\n".join(lines)
        if lines[0].startswith("# "):
            time = f'<p class="reading-time" data-search-exclude>{reading_time(text)}</p>'
            text = "\n".join([lines[0], "", self.md.htmlStash.store(time), *lines[1:]])
        self.add_subtitle(dict.fromkeys(file for file, _ in re.findall(COG_FENCE, text)))
        text = re.sub(f"({COG_FENCE}diff .*)", r'\1 file="\2" unit="\3"', text)
        text = re.sub(f"({COG_FENCE}(?:python|bash))(?=\n)", r'\1 title="\2 · \3"', text)
        compared = dict.fromkeys(file for file, _ in re.findall(f"{COG_FENCE}diff ", text))
        for file in compared:
            text += f"\n\n## {file} in full {{ data-search-exclude }}\n\n{link_to_diff(file)}\n\n"
            text += self.md.htmlStash.store(format_file(file))
        before = text
        for mark, format_page in CHOICES.items():
            if mark in text:
                text = text.replace(mark, self.md.htmlStash.store(format_page()))
        text = text.replace("<!-- rules -->", format_rules())
        played = re.search(f"{RECORDING}|<!-- recordings -->", before)
        store = self.md.htmlStash.store
        text = re.sub(RECORDING, lambda found: store(format_recording(found)), text)
        if played:
            top = "../" * (played[1] or "").count("/")
            text += "\n\n" + store(PLAYER.format(top))
        return [*text.split("\n"), "", store(format_units(compared))]

    def add_subtitle(self, files):
        """Puts the names of a page's scripts below its title in the sidebar, if Zensical builds."""
        scripts = [file for file in files if file.endswith(".py")]
        context = next((step for step in self.md.preprocessors if hasattr(step, "page")), None)
        if scripts and context:
            names = ", ".join(script.rpartition("/")[2] for script in scripts)
            context.page.meta["subtitle"] = names


def format_rules():
    """Returns the chapters of rankcheck's rules, each of which can be linked to by its id."""
    text = "\n".join(path.read_text() for path in sorted(FOLDER.glob("[0-9]_*.md")))
    text = re.sub(r"^#", "##", text, flags=re.MULTILINE)
    text = text.replace("```diff", "```udiff")  # the other name: diffs of the series are folded
    return re.sub(r"^(### (RC\d+): .*)", r"\1 { #\2 }", text, flags=re.MULTILINE)


def mark_options(found):
    return re.sub(r"(?<![\w-])--[\w-]+", r'<span class="option">\g<0></span>', found[0])


class Options(Postprocessor):
    """Marks each option in the prose, which no line may end within."""

    def run(self, text):
        """Returns the HTML of a page with them."""
        return INLINE_CODE.sub(mark_options, text)


class SourcesExtension(Extension):
    """Adds `Sources` and `Options` to Markdown's steps."""

    def extendMarkdown(self, md):  # noqa: N802, Markdown's name
        """Does so, as Markdown asks an extension to do."""
        md.preprocessors.register(Sources(md), "sources", 28)  # before superfences, at 25
        md.postprocessors.register(Options(md), "options", 5)  # after "raw_html", at 30


def makeExtension(**kwargs):  # noqa: N802, Markdown's name
    """Returns the extension that this module is."""
    return SourcesExtension(**kwargs)
