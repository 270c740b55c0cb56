"""The sections of the rules: each is of a rule that is in the code, and its example breaks it."""

import re
from pathlib import Path

import pytest

import rankcheck
from helpers import audit, by_day
from rankcheck import rules
from rankcheck.auditor import DIFFERENCES

RULES = rules.load()
SHOWN = [rule.id for rule in RULES.values() if rule.script]


def test_each_rule_has_a_section():
    """An id that is in the code alone, or in the chapters alone, is a mistake."""
    sources = Path(rankcheck.__file__).parent.glob("**/*.py")
    found = [re.findall(r'"(RC\d{3})"', path.read_text()) for path in sources]
    assert {rule_id for ids in found for rule_id in ids} == RULES.keys()


def test_an_error_has_no_exception():
    """Its section says why no correct script does it; what one may do is a warning there."""
    sources = [path.read_text() for path in Path(rankcheck.__file__).parent.glob("**/*.py")]
    for rule in RULES.values():
        calls = rf'(\w+)\("{rule.id}"'
        levels = {call for text in sources for call in re.findall(calls, text)}
        if not levels:  # it is said by a name
            levels = {"say"} if rule.id in DIFFERENCES.values() else {"warning"}
        assert ("No correct script" in rule.text) == bool({"error", "say"} & levels), rule.id
        assert ("Ignore it if" in rule.text) == (levels == {"warning"}), rule.id


@pytest.mark.parametrize("rule_id", SHOWN)
def test_diff_fits(rule_id):
    rule = RULES[rule_id]
    assert rules.example(rule) != (rules.FOLDER / "scripts" / rule.script).read_text()


DIFF = "```diff\n--- spawned.py\n+    dist.destroy_process_group()\n```\n"


@pytest.mark.parametrize(
    "section",
    [
        f"## RC101: It hangs\n\n{DIFF}",
        f"## It hangs\n\n{DIFF}",
        "## RC201: Each epoch has the same order\n\nIt is silent.\n",
        f"## RC201: Each epoch has the same order\n\n{DIFF}\nNot shown here: it is.\n",
        "## RC201: Each epoch has the same order\n\n```python\n```\n",
    ],
)
def test_section_of_another_form(section):
    with pytest.raises(ValueError, match=r"2_data.md, ## \w+"):
        rules.parse(section, "2_data.md")


@pytest.mark.parametrize("rule_id", by_day(1, SHOWN[::-1]))  # the first one hangs
def test_example_breaks_its_rule(tmp_path, rule_id):
    """If a finding names a line, the diff shows it."""
    rule = RULES[rule_id]
    source = rules.example(rule)
    (tmp_path / "faulty.py").write_text(source)
    found = [f for f in audit(tmp_path, tmp_path / "faulty.py") if f.rule == rule.id]
    assert found
    shown = {line for lines, _ in rules.places(rule) for line in lines.splitlines()}
    numbered = {
        f"{tmp_path}/faulty.py:{number}": line for number, line in enumerate(source.splitlines(), 1)
    }
    assert any(not f.place or numbered[f.place] in shown for f in found), found
