"""`aot-lora check --junit`: a test case for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from aot_lora import errors

if TYPE_CHECKING:
    from aot_lora.cli.check_report import Checked


def write_junit(checked: Sequence[Checked], path: Path) -> None:
    """Writes the file.

    Raises:
      StoreError: it cannot be written.
    """
    root = ElementTree.Element("testsuites", name="aot-lora check")
    for one in checked:
        suite = ElementTree.SubElement(root, "testsuite", name=one.name)
        cases: dict[str, tuple[str, str, str]] = {}
        if one.found:
            cases |= dict.fromkeys(one.found.stable, ("", "", ""))
        for group in one.groups:
            for name in group.names:
                details = [group.detail if name == group.names[0] else "", *one.diffs.get(name, ())]
                text = "\n".join(filter(None, details))
                cases[name] = ("failure", f"{group.kind}: {group.cause}", text)
        for each in one.differing:
            cases[each.name] = ("failure", f"traced twice: {each.why}", "\n".join(each.diff))
        for name, failure in one.failures.items():
            cases[name] = ("error", failure.error.problem, str(failure))
        if one.error:
            cases[one.name] = ("error", one.error.problem, str(one.error))
        for name, (tag, message, text) in cases.items():
            target, _, variant = name.rpartition(" ")
            case = ElementTree.SubElement(
                suite, "testcase", classname=target or "lock", name=variant
            )
            if tag:
                ElementTree.SubElement(case, tag, message=message).text = text
        tags = [tag for tag, _, _ in cases.values()]
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(tags.count("failure")))
        suite.set("errors", str(tags.count("error")))
    ElementTree.indent(root)
    try:
        path.write_bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise errors.StoreError(
            f"the JUnit file cannot be written: {error.strerror}", where=str(path)
        ) from None
