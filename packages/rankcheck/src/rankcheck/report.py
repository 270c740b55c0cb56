"""Prints findings: as lines, JSON, annotations of GitHub, or JUnit's XML."""

import json
import linecache
import os
import re
from xml.etree import ElementTree

import rankcheck

LEVELS = ("error", "warning")
IGNORE = re.compile(r"#\s*rankcheck:\s*ignore\[([\w, ]+)\]")


def names(text):
    return set(text.replace(",", " ").split())


def is_ignored(finding, rules):
    """Whether the finding's rule is among `rules`, or in a comment on the line that it names."""
    file, _, line = finding.place.rpartition(":")
    comment = IGNORE.search(linecache.getline(file, int(line))) if file else None
    return finding.rule in rules or (comment and finding.rule in names(comment[1]))


def grouped(findings):
    """Returns the findings, each once: those that differ in numbers and names alone are counted."""
    groups = {}
    for finding in findings:
        form = re.sub(r"[^\s:,;]*[\d.][^\s:,;]*", "#", finding.text)
        groups.setdefault((finding.level, finding.rule, form), []).append(finding)
    for first, *others in groups.values():
        places = dict.fromkeys(other.place for other in others if other.place != first.place)
        file = first.place.rpartition(":")[0]
        lines = [place.removeprefix(f"{file}:").rpartition("/")[2] for place in places]
        also = f" (also at {', '.join(lines)})" if places else ""
        more = f" (and {len(others)} more of this kind)" if others and not places else ""
        yield first._replace(text=f"{first.text}{also}{more}")


def kept(findings, ignored):
    """Returns the findings in their order of weight, without those that are ignored."""
    shown = [f for f in grouped(findings) if not (f.rule and is_ignored(f, ignored))]
    return sorted(shown, key=lambda finding: (*LEVELS, "ok", "unseen").index(finding.level))


def split_place(finding, script):
    """Returns a finding's file, as one would type it here, and its line, or the script and None."""
    file, _, line = finding.place.rpartition(":")
    near = os.path.relpath(file or script)
    return (near if len(near) < len(file or near) else file or near), int(line) if line else None


def count(number, what):
    return f"{number} {what}" + ("s" if number != 1 and what in LEVELS else "")


def as_text(findings, script, verbose):
    """Returns a line for each error and warning, and one that counts the rest."""
    lines = []
    for finding in findings:
        if finding.level in LEVELS:
            file, line = split_place(finding, script)
            place = f"{file}:{line}" if line else file
            lines.append(f"{place}: {finding.rule} {finding.level}  {finding.text}")
        elif verbose:
            lines.append(f"{'not seen' if finding.level == 'unseen' else 'ok'}: {finding.text}")
    number = {level: sum(f.level == level for f in findings) for level in (*LEVELS, "ok", "unseen")}
    total = ", ".join(count(number[level], level) for level in LEVELS)
    rest = f"{number['ok']} ok, {number['unseen']} not seen"
    hints = [] if verbose else ["-v lists them"]
    first = next((f.rule for f in findings if f.rule), "")
    hints += [f"rankcheck explain {first} says more"] if first else []
    return "\n".join([*lines, f"{total}; {rest}" + (f" ({'; '.join(hints)})" if hints else "")])


def as_json(findings, script, verbose):
    rows = []
    for finding in findings:
        file, line = split_place(finding, script)
        row = {"rule": finding.rule, "level": finding.level, "text": finding.text}
        rows.append(row | ({"file": file, "line": line} if finding.level in LEVELS else {}))
    return json.dumps({"rankcheck": rankcheck.__version__, "findings": rows}, indent=1)


def as_github(findings, script, verbose):
    """Returns workflow commands, which become annotations of a pull request."""
    lines = []
    for finding in findings:
        if finding.level in LEVELS:
            file, line = split_place(finding, script)
            place = f"file={file}" + (f",line={line}" if line else "")
            text = finding.text.replace("%", "%25").replace("\n", "%0A")
            lines.append(f"::{finding.level} {place},title={finding.rule}::{text}")
    return "\n".join(lines)


def as_junit(findings, script, verbose):
    """Returns a test case for each finding: errors and warnings fail, the unseen is skipped."""
    suite = ElementTree.Element("testsuite", name="rankcheck", tests=str(len(findings)))
    failures = [finding for finding in findings if finding.level in LEVELS]
    suite.set("failures", str(len(failures)))
    suite.set("skipped", str(sum(finding.level == "unseen" for finding in findings)))
    for finding in findings:
        file, line = split_place(finding, script)
        name = f"{finding.rule} {finding.text}".strip()
        case = ElementTree.SubElement(suite, "testcase", classname=file, name=name)
        if finding in failures:
            failure = ElementTree.SubElement(case, "failure", type=finding.level)
            failure.text = f"{file}:{line or ''} {finding.text}"
        elif finding.level == "unseen":
            ElementTree.SubElement(case, "skipped")
    return ElementTree.tostring(suite, encoding="unicode")


FORMATS = {"text": as_text, "json": as_json, "github": as_github, "junit": as_junit}
