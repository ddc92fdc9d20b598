"""A judgement in the forms that CI reads: JUnit XML, a Markdown summary, lines for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as xml

from optforge.gate import judge
from optforge.gate.judge import MISSED, PASSED, UNDECIDED, Judgement
from optforge.report.markdown import escaped

WORD = {PASSED: "passed", MISSED: "**missed**", UNDECIDED: "undecided"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def lines(judgement: Judgement) -> Iterator[str]:
    """One line per limit, what to know, and the verdict."""
    yield from map(str, judgement.findings)
    yield from (f"note: {note}" for note in judgement.notes)
    yield judge.summary(judgement)


def junit(judgement: Judgement) -> str:
    """JUnit XML: a test case per limit, a failure for each that fails, skipped where it is undecided and that may pass."""
    suite = xml.Element(
        "testsuite",
        name=_text(judgement.title),
        tests=str(len(judgement.findings)),
        failures=str(len(judgement.failed)),
        skipped=str(sum(finding.verdict == UNDECIDED and not judgement.fails(finding) for finding in judgement.findings)),
        errors="0",
    )
    properties = xml.SubElement(suite, "properties")
    for key, value in judgement.facts.items():
        xml.SubElement(properties, "property", name=key, value=_text(value))
    for finding in judgement.findings:
        case = xml.SubElement(suite, "testcase", classname="optforge.gate", name=_text(finding.limit))
        if judgement.fails(finding):
            xml.SubElement(case, "failure", type=finding.verdict, message=_text(finding.found)).text = _text(str(finding))
        elif finding.verdict == UNDECIDED:
            xml.SubElement(case, "skipped", message=_text(f"undecided: {finding.found}"))
        xml.SubElement(case, "system-out").text = _text(str(finding))
    if judgement.notes:
        xml.SubElement(suite, "system-out").text = _text("\n".join(judgement.notes))
    root = xml.Element("testsuites")
    root.append(suite)
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def markdown(judgement: Judgement) -> str:
    """A summary for a pull request."""
    rows = [
        f"| {WORD[finding.verdict]} | {escaped(finding.limit)} | {escaped(finding.found)} | {escaped(finding.detail)} |"
        for finding in judgement.findings
    ]
    facts = [f"- {key}: {escaped(value)}" for key, value in judgement.facts.items() if value]
    notes = [f"> {escaped(note)}" for note in judgement.notes]
    parts = [f"## {escaped(judge.summary(judgement))}", "\n".join(["| | limit | found | from |", "|---|---|---|---|", *rows])]
    parts += ["\n>\n".join(notes)] if notes else []
    parts += ["\n".join(facts)] if facts else []
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Text without the control characters that XML does not have."""
    return _NOT_XML.sub("?", text)
