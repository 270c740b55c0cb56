"""The docs show the code as it is, the site works, and what they tell to type is tested."""

import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from browser import browser_of, served
from helpers import IGNORED, NIGHTLY, fences, run

from tools import steps
from tools.compose.compose import compose
from tools.formulas import calculator
from tools.pages.moved import MOVED
from tools.steps import ROOT, diff_lines
from tools.units.stored import DOCSTRING, NOTHING, digests, load, split

AWS = ROOT / ".venv" / "aws" / "bin" / "python"


def test_what_is_wrong_is_named(tmp_path):
    """By what `make docs` runs: a block twice and without prose, a diff typed, pages too long."""
    copy = Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True))
    script, page = copy / "multigpu.py", copy / "docs" / "multigpu.md"
    script.write_text(script.read_text().replace("loss.backward()", "loss.backward()  # hooks"))
    block = '<!-- [[[cog fence("multigpu.py", "__main__") ]]] -->\n<!-- [[[end]]] -->\n'
    diff = "```diff\n-a\n+b\n```\n"
    page.write_text(f"{page.read_text()}\n## Again\n\n{block}\n## End\n\n{diff}{'word ' * 5000}")
    with (copy / "README.md").open("a") as readme:
        readme.write(diff)
    shutil.copy(copy / "multinode.py", copy / "recipes" / "own.py")
    faults = copy / "tools" / "edits" / "faults.diff"
    faults.write_text(faults.read_text().replace("(epoch)", "()", 1))
    result = run("python", "-m", "tools.pages.check_docs", folder=copy)
    assert result.returncode == 1
    for message in (
        r'multigpu\.py: .*_run_batch is on no page: fence\("multigpu\.py", ".*_run_batch"\)',
        r"docs/multigpu\.md:\d+: __main__ of multigpu\.py stands at docs/multigpu\.md:\d+ already",
        r"docs/multigpu\.md:\d+: no prose beside __main__ of multigpu\.py",
        r"docs/multigpu\.md:\d+: a diff typed by hand",
        r"README\.md:\d+: a diff typed by hand",
        r"docs/multigpu\.md: \d+\.\d minutes to read, of 8",
        r"the stages' pages: \d+\.\d minutes, of 25",
        r"recipes/own\.py is in no step: write a line for it into tools/steps\.py",
        r"tools/edits/faults\.diff:1: set_epoch is missing: not once in multigpu\.py",
    ):
        assert re.search(f"^{message}", result.stderr, re.MULTILINE), result.stderr


WRONG = {  # an edit of a file, and what a command of `make docs` then says
    "mkdocs.yml": ("- recipes/fsdp.md\n", "\n", "mkdocs.yml or in docs/, not in both: recipes/fs"),
    "tools/steps.py": ("s/fsdp", "s/clip", "write docs/recipes/clip.md, the page of recipes/cl"),
    "multinode.py": ("\nimport", "\n<<<<<<<", "multinode.py:11: invalid syntax; is a conflict"),
}


@pytest.mark.parametrize("file", WRONG)
def test_make_docs_fails_in_words(tmp_path, file):
    copy = Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True))
    old, new, message = WRONG[file]
    (copy / file).write_text((copy / file).read_text().replace(old, new, 1))
    links = [sys.executable, "-m", "tools.pages.next_links"]
    command = links if file == "mkdocs.yml" else ["make", "-o", ".venv/dev", "docs"]
    result = run(*command, folder=copy)
    assert result.returncode != 0 and message in result.stderr, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_pages_are_as_made(tmp_path):
    """Each shows the code as it is, and every changed line, or `make docs` would have failed."""
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True)
    made = run("make", "-o", ".venv/dev", "pages", folder=copy)
    assert made.returncode == 0, made.stdout + made.stderr
    for name in ("README.md", "docs"):
        result = run("diff", "-r", name, copy / name)
        assert result.returncode == 0, f"run make docs: {result.stdout}"


# Pages with a script of their own, and something that it makes.
MADE = {
    "choose": "#calculator tbody tr",
    "compose": "#compose code .line",
    "diff": "#compare .line",
    "multigpu": ".diff [tabindex]",
    "watch": ".watch .says",
}


@pytest.mark.long
def test_scripts_of_the_pages_run(site):
    problems = []
    with browser_of(site) as (page, address):
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name, made in MADE.items():
            page.goto(f"{address}/{name}.html")
            page.locator(made).first.wait_for(state="attached")
    assert not problems


@pytest.mark.long
def test_old_addresses_lead_on(site):
    """To the page that has the text now: with its section, or the one that was asked for."""
    with browser_of(site) as (page, address):
        for old, new in MOVED.items():
            name, _, section = new.partition("#")
            page.goto(f"{address}/{old}.html")
            page.wait_for_url(f"{address}/{name}.html{section and '#'}{section}")
        page.goto(f"{address}/cost.html?params=70#more-ranks")
        page.wait_for_url(f"{address}/choose.html?params=70#more-ranks")


# Takes away the lines of code that have no colour, on no background, that a line before has not.
THIN = """() => {
  const seen = new Set();
  for (const line of document.querySelectorAll("pre :is(.line, ins, del), pre code > span")) {
    const words = [line, ...line.querySelectorAll("*")];
    const looks = words.map((word) => line.tagName + word.tagName + word.className);
    if (looks.every((look) => seen.has(look))) line.remove();
    looks.forEach((look) => seen.add(look));
  }
}"""
# Returns how many blocks of code are wider than their box, without commands and outputs, which may
# be, as all may on a phone.
MEASURE = """() => {
  for (const hint of document.querySelectorAll("article > details")) hint.open = true;
  const blocks = [...document.querySelectorAll("article :not(details) > pre > code")];
  const code = blocks.filter((block) => !block.closest(".language-sh, .language-text"));
  return code.filter((block) => block.scrollWidth > block.clientWidth).length;
}"""


def aborted(request):
    """Tells whether it failed only because the browser went to the next page meanwhile."""
    return request.failure == "net::ERR_ABORTED"


@pytest.mark.long
@pytest.mark.parametrize("every", [30, pytest.param(1, marks=NIGHTLY)])
def test_site_in_a_browser(site, every):
    """Pages at two widths: nothing fails, sticks out, or is hard to read, light or dark."""
    from axe_core_python.sync_playwright import Axe

    problems, pages = [], sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    pages = [page for page in pages if page.removesuffix(".html") not in MOVED]
    assert len(pages) == len(list((ROOT / "docs").rglob("*.md"))) + 1  # and 404.html
    brief = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa"]}
    with browser_of(site) as (page, address):
        page.add_init_script("localStorage.clear()")  # where the theme keeps light or dark
        page.on("console", lambda m: m.type == "error" and problems.append((name, m.text)))
        page.on("pageerror", lambda error: problems.append((name, str(error))))
        page.on("requestfailed", lambda r: aborted(r) or problems.append((name, "failed", r.url)))
        own = (address, "data:", "blob:")
        page.on("request", lambda r: r.url.startswith(own) or problems.append((name, r.url)))
        for number, name in enumerate(pages[::every]):
            # The pages look alike: axe sees each in one of the four combinations.
            page.emulate_media(color_scheme="dark" if number % 2 else "light")
            page.goto(f"{address}/{name}")
            # A colour that is about to change has a contrast of its own.
            page.add_style_tag(content="*, ::before, ::after { transition: none !important }")
            for width in (400, 1280) if number % 4 < 2 else (1280, 400):
                page.set_viewport_size({"width": width, "height": 900})
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    problems.append((name, f"wider than a screen of {width} pixels"))
                if width > 400 and (wide := page.evaluate(MEASURE)):
                    problems.append((name, width, f"{wide} blocks too wide"))
            page.evaluate(THIN)
            # Its sidebar is that of the first pages; to take it away confuses the theme's scripts.
            looked_at = {"exclude": [".md-sidebar"]} if number >= 4 else "body"
            scheme = page.evaluate("document.body.dataset.mdColorScheme")
            assert scheme == ("slate" if number % 2 else "default")
            for found in Axe().run(page, looked_at, brief)["violations"]:
                if found["impact"] in ("serious", "critical"):
                    where = found["nodes"][0]["html"][:200]
                    problems.append((name, scheme, width, found["id"], where))
        page.goto(f"{address}/cheat_sheet.html")
        # The commands on one sheet, the words on another.
        assert re.findall(rb"/Count (\d+)", page.pdf(format="Letter")) == [b"2"]
    assert not problems, "\n".join(map(str, problems))


# What readers look for, and the page that answers.
SEARCHES = {
    "upgrade torch": "errors",
    "result right": "your_project",
    "two kinds of GPU": "choose",
    "money": "choose",
    "validation": "gpt/evaluate",
}


@pytest.mark.long
def test_search_of_a_file(site):
    """It finds pages when the site is opened without a server, too."""
    from playwright.sync_api import expect

    with browser_of(site) as (page, _):
        page.goto((site / "recipes" / "fsdp.html").as_uri())
        page.keyboard.press("Control+k")
        first = page.get_by_role("option").first
        for words, found in SEARCHES.items():
            page.get_by_role("combobox", name="Search").fill(words)
            address = re.escape(f"{site.as_uri()}/{found}.html?h={words.replace(' ', '+')}")
            expect(first).to_have_attribute("href", re.compile(address), timeout=60_000)
        first.click()
        page.wait_for_url(re.compile(address))


def test_picture_of_a_step_is_as_recorded():
    """Its samples, gradients and weights: those of the first step of epoch 1 of multigpu.py."""
    picture = ElementTree.parse(ROOT / "docs" / "assets" / "one_step.svg").getroot()
    text = "\n".join(picture.itertext()).replace("\N{MINUS SIGN}", "-")
    found = re.findall(r"^-?[\d.]+$", text, re.MULTILINE)
    recordings = json.loads((ROOT / "docs" / "assets" / "recordings.json").read_text())
    expected = []
    for events in recordings["multigpu.py"]["attempts"][0]:
        steps = []
        for _, _, changed, *_ in events:
            if "step" in changed:
                steps.append({})
            if steps:
                steps[-1] |= changed
        _, before, step, next_step = steps
        expected += [f"{float(step[name]):.3f}" for name in ("own gradient", "gradient")]
        expected += [expected[-2]]  # in its rank's half, and as a copy that moves
        expected += [f"{float(values['weight']):.4f}" for values in (before, step)]
        expected += f"{step['samples']} {step['samples']} {next_step['samples']}".split()
    assert Counter(found) == Counter(expected)


# Returns the lines that one sees of a comparison, each with its sign.
SHOWN = """(lines) => lines.map(
  (line) => ({ INS: "+", DEL: "-", SPAN: " " })[line.tagName] + line.textContent.trimEnd()
)"""


@pytest.mark.long
def test_a_touched_line_says_what_falls_without_it(site):
    """A click or a key on a changed line of a diff marks its unit, and names what fails."""
    answers = load()["multigpu.py"]
    changed = diff_lines("singlegpu.py", "multigpu.py")
    texts = {key: line[1:].strip() for key, line in zip(digests(changed), changed, strict=True)}
    with browser_of(site) as (page, address):
        page.goto(f"{address}/multigpu.html")
        page.evaluate(
            "for (const part of document.querySelectorAll('article > details')) part.open = true"
        )
        lines = page.locator(".diff > pre [data-unit]").all()
        assert len(lines) == sum(len(split(unit["lines"])) for unit in answers)
        for line in lines[::4]:
            line.click()
            marked = page.locator(".diff > pre .marked").all_text_contents()
            note = page.inner_text(".without")
            (unit,) = (unit for unit in answers if f": {unit['without']}" in note)
            assert Counter(text.strip() for text in marked) == Counter(
                texts[key] for key in split(unit["lines"])
            )
            assert unit["falls"].partition("[")[0] in note or unit["falls"] in (DOCSTRING, NOTHING)
            page.keyboard.press("Escape")
            assert not page.locator(".without, .marked").count()
        stops = page.locator(".diff > pre [tabindex]")
        stops.first.focus()
        page.keyboard.press("Enter")
        assert page.inner_text(".without").startswith("Without it: ")
        assert stops.first.get_attribute("aria-expanded") == "true"


@pytest.mark.long
def test_any_two_files_can_be_compared(site):
    """Those that a page or an address names, or that one chooses, with every line that differs."""

    def compares(a, b):
        page.wait_for_url(f"{address}/diff.html?a={a}&b={b}")
        lines = page.locator("#compare .line").evaluate_all(SHOWN)
        removed = Counter(line[1:] for line in lines if line[0] == "-")
        added = Counter(line[1:] for line in lines if line[0] == "+")
        old, new = (Counter((ROOT / file).read_text().splitlines()) for file in (a, b))
        assert removed - added == old - new and added - removed == new - old
        changed = steps.changed_lines(a, b)  # without blank ones
        assert sum(line[0] in "+-" and line[1:] != "" for line in lines) == changed
        shown = page.locator("#compare .caption").inner_text()
        assert shown == f"{a} → {b}: {changed} changed lines"

    with browser_of(site) as (page, address):
        page.goto(f"{address}/recipes/verify.html")
        page.click("text=Compare it")
        compares("multinode.py", "recipes/verify.py")
        page.goto(f"{address}/diff.html?a=gpt/pretrain.py&b=gpt/fsdp.py")
        compares("gpt/pretrain.py", "gpt/fsdp.py")
        page.select_option("#compare select >> nth=0", "slurm/multinode.sbatch")
        page.select_option("#compare select >> nth=1", "slurm/preemptible.sbatch")
        compares("slurm/multinode.sbatch", "slurm/preemptible.sbatch")


@pytest.mark.long
def test_composed_in_the_page(site):
    """A script that is chosen there is the one that the command writes, to the byte."""
    with browser_of(site) as (page, address):
        page.goto(f"{address}/compose.html?files=recipes/fsdp.py,recipes/evaluate.py")
        page.check("input[value='recipes/tensorboard_logging.py']")
        assert page.url.endswith("?files=recipes/fsdp.py,recipes/tensorboard_logging.py")
        assert page.is_disabled("input[value='recipes/verify.py']")
        assert "different shards" in page.inner_text("label:has([value='recipes/verify.py'])")
        assert page.locator(".part-0.line").count() > 5 < page.locator(".part-1.line").count()
        with page.expect_download() as download:
            page.click("#compose button:text('Save')")
        lines = compose(["recipes/tensorboard_logging.py", "recipes/fsdp.py"], "my_training.py")
        expected = "".join(f"{line}\n" for line, _ in lines)
        assert Path(download.value.path()).read_text() == expected
        page.select_option("#compose select", "gpt/hsdp.py")
        page.check("input[value='gpt/accumulate.py']")
        assert "hsdp.py" in page.inner_text("#compose code")


# Links into the page with a calculator: together, they need all of its formulas.
CALCULATIONS = [
    "params=0.5&gpus=1&batch_size=1",
    "params=0.5&gpus=8&gpu_memory=24&batch_size=1&context=256&compile=yes",
    "params=8&gpus=64&batch_size=2",
    "params=13&gpus=12&batch_size=5&context=4096&loss_chunks=8",
    "params=70&gpus=100&gpu_memory=141&batch_size=1&llama=yes",
    "params=70&gpus=2048&batch_size=1&compile=yes&llama=yes",
    "params=1&gpus=16384&batch_size=1&context=256",
    "params=1.6&gpus=7&gpu_memory=40&batch_size=8&context=1024&loss_chunks=4&compile=yes",
    "params=405&gpus=16384&gpu_memory=192&batch_size=1&context=262144&loss_chunks=64&llama=yes",
    "params=1000&gpus=512&batch_size=2",
]
# Returns the rows of the calculator, a text each, without the three cells of the cost.
ROWS = """[...document.querySelectorAll("#calculator tbody tr")].map((row) => {
  const cells = [...row.cells].map((cell) => cell.textContent);
  return (row.closest("details") ? cells : cells.slice(0, 4)).join(" ");
})"""


def calculate(query, monkeypatch, capsys):
    """Returns what tools/formulas/calculator.py prints about what a link asks the page for."""
    values = dict(parse_qsl(query))
    options = {"compile": "--compile", "llama": "--block=llama"}
    arguments = [option for name, option in options.items() if name in values]
    for name in values.keys() - {*options, "recompute"}:
        unit = "e9" if name in ("params", "gpu_memory") else ""
        arguments.append(f"--{name}={values[name]}{unit}")
    monkeypatch.setattr(sys, "argv", ["calculator.py", *arguments])
    calculator.main()
    return capsys.readouterr().out


@pytest.mark.long
def test_calculator_in_the_page(site, monkeypatch, capsys):
    """Its figures are those of tools/formulas/calculator.py; its state stands in the address."""
    with browser_of(site) as (page, address):
        page.goto(f"{address}/choose.html?params=70&gpus=512&batch_size=1")
        assert page.locator("#calculator [name=params]").input_value() == "70"
        assert not page.is_checked("#calculator [name=recompute]")
        page.check("#calculator [name=recompute]")
        page.locator("#calculator [type=range] >> nth=1").focus()
        page.keyboard.press("End")
        page.wait_for_function("location.search.includes('params=70&gpus=16384&')")
        assert "recompute=yes" in page.url
        for query in CALCULATIONS:
            page.goto(f"{address}/choose.html?{query}&recompute=yes")
            printed = calculate(query, monkeypatch, capsys)
            speeds = dict(re.findall(r"^(\w.*?)  +[\d,]+ +\S+ +(\S+)$", printed, re.MULTILINE))
            ways, parts = [], []
            row = r"^(\w.*?) +((?:[\d.]+ +){7})(yes|no)$"
            for name, numbers, fits in re.findall(row, printed, re.MULTILINE):
                speed = speeds.get(name, "\N{EN DASH}")
                ways.append(f"{name} {numbers.split()[-1]} {fits} {speed}")
                parts.append(" ".join([name, *numbers.split()]))
            assert page.evaluate(ROWS) == ways + parts, query


def test_worked_questions(monkeypatch, capsys):
    """Each number of an answer in docs/choose.md is one of the calculator's, for its links."""
    text = (ROOT / "docs" / "choose.md").read_text()
    answers = text.split("### Two questions")[1].split("\n## ")[0].split("<details")[1:]
    assert len(answers) == 2
    for answer in answers:
        queries = re.findall(r"\.md\?([\w=&]+)", answer)
        calculated = " ".join(calculate(query, monkeypatch, capsys) for query in queries).split()
        claimed = re.findall(r"(\d+\.\d)\s+GB", answer) + re.findall(r"(\S+)\s+tokens/s", answer)
        assert claimed and set(claimed) <= set(calculated), (answer, calculated)


@pytest.mark.long
def test_what_a_training_costs(site):
    """Of the tokens of a second that the page shows: hours, GPU hours and money."""
    with browser_of(site) as (page, address):
        page.goto(f"{address}/choose.html?params=8&gpus=64&tokens=100&price=3&recompute=yes")
        row = page.locator("#calculator tr.fits").first.inner_text()
        page.fill("[name=tokens]", "0")
        assert "Tokens, billions" in page.inner_text("#calculator [role=status]")
    speed, hours, gpu_hours, cost = map(float, row.replace(",", "").split("\t")[3:])
    assert hours == pytest.approx(100e9 / speed / 3600, rel=0.1)
    assert gpu_hours == pytest.approx(64 * hours, rel=0.1)
    assert cost == pytest.approx(3 * gpu_hours, rel=0.1)


@pytest.mark.long
def test_diffs_lead_to_the_whole_file(site):
    """Each names its file and its function, and links to the function in the file."""
    shown = 0
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert len(text) < 256_000, page  # a phone loads it, too
        links = re.findall(r'class="caption"><a href="#([^"]+)"', text)
        assert set(links) <= set(re.findall(r' id="([^"]+)"', text)), page
        shown += len(links)
        if page.name == "multigpu.html":
            assert "multigpu.py:Trainer._run_epoch" in links
    diffs = sum(page.read_text().count("\n```diff ") for page in (ROOT / "docs").rglob("*.md"))
    assert 0.9 * diffs < shown <= diffs  # functions that a step removes are in no file


@pytest.mark.long
def test_links_of_the_site(site, tmp_path):
    config = tmp_path / "linkcheckerrc"
    config.write_text("[checking]\nmaxrequestspersecond=1000\n[filtering]\nignore=^https:\n")
    with served(site) as address:
        result = run("linkchecker", "--no-status", "--config", config, f"{address}/index.html")
    assert result.returncode == 0, result.stdout


def test_links_outside_the_site():
    for page in ROOT.glob("*.md"):
        for link in re.findall(r"\]\((?!https:|#)([^)#]+)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name}: {link} leads nowhere"


def test_sessions_in_python(tmp_path):
    """What a page types into Python answers as the page shows."""
    sessions = []
    for page in (ROOT / "docs").rglob("*.md"):
        if session := fences(page, "pycon"):
            sessions.append(tmp_path / page.name)
            sessions[-1].write_text("\n".join(session))
    result = run("python", "-m", "doctest", *sessions)
    assert sessions and result.returncode == 0, result.stdout + result.stderr


def test_pictures_are_well_formed():
    for picture in (ROOT / "docs" / "assets").rglob("*.svg"):
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("}svg")


@pytest.mark.nightly
@pytest.mark.skipif(
    not AWS.exists(), reason="get the test of slurm/aws-cluster.yaml with: make .venv/aws"
)
def test_aws_cluster():
    """It is valid by ParallelCluster's own schema."""
    code = (
        "import sys, yaml; from pcluster.schemas.cluster_schema import ClusterSchema\n"
        "ClusterSchema(cluster_name='ddp').load(yaml.safe_load(sys.stdin))"
    )
    text = (ROOT / "slurm" / "aws-cluster.yaml").read_text()
    env = os.environ | {"AWS_DEFAULT_REGION": "us-east-1"}
    result = run(AWS, "-c", code, input=text, env=env)
    assert result.returncode == 0, result.stderr
