"""What was checked and found, as a summary that claims no more than ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Status(Enum):
    """How a part of the ladder came out; ``BLOCKED`` is not evidence against the model's support."""

    PASS = "Pass"
    FAIL = "Fail"
    SKIPPED = "Skipped"
    BLOCKED = "Blocked"


EXIT = {Status.PASS: 0, Status.FAIL: 1, Status.BLOCKED: 3}
"""Exit status of the program by overall result; 2 is a wrong command line."""


@dataclass(frozen=True)
class Check:
    """A figure, what it must be, and whether it is."""

    text: str
    ok: bool


@dataclass(frozen=True)
class Item:
    """A part of a level.

    Attributes:
        text: the checked figures, or the reason why it did not pass.
        log: of the run that it is read from, which begins with the command; None where nothing ran.
        left_out: skipped although it applies to the model, for lack of slots, memory or kernels.
    """

    part: str
    status: Status
    text: str
    log: Path | None = None
    left_out: bool = False


def checked(part: str, checks: Sequence[Check], log: Path | None) -> Item:
    """Passed if every figure is what it must be; else the text has those that are not."""
    wrong = [check.text for check in checks if not check.ok]
    if wrong:
        return Item(part, Status.FAIL, "not so: " + "; ".join(wrong), log)
    return Item(part, Status.PASS, "; ".join(check.text for check in checks), log)


@dataclass(frozen=True)
class LevelResult:
    """What a level's parts came to."""

    number: int
    items: tuple[Item, ...]

    @property
    def status(self) -> Status:
        """Failed or blocked if a part is; passed if at least one part did and the others do not apply."""
        found = {item.status for item in self.items}
        order = (Status.FAIL, Status.BLOCKED, Status.PASS)
        return next((status for status in order if status in found), Status.SKIPPED)


@dataclass
class Report:
    """The summary of a whole call.

    Attributes:
        titles: of all levels, by number.
        preliminary: what is checked before the levels.
        levels: those that have run so far, of the ``requested`` ones.
        log_capture: whether every run so far left a log.
        key_lines: of every run so far, by its name.
    """

    model: str
    requested: tuple[int, ...]
    output: Path
    titles: Mapping[int, str]
    preliminary: list[Item] = field(default_factory=list)
    levels: list[LevelResult] = field(default_factory=list)
    log_capture: Item | None = None
    evidence: list[tuple[str, str]] = field(default_factory=list)
    key_lines: list[tuple[str, str]] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)

    @property
    def result(self) -> Status:
        """Passed only if every requested level ran and passed; a level that was left out blocks that."""
        found = [level.status for level in self.levels] + [item.status for item in self._of_no_level()]
        if Status.FAIL in found:
            return Status.FAIL
        complete = {level.number for level in self.levels if level.status is Status.PASS} == set(self.requested)
        return Status.PASS if complete and Status.BLOCKED not in found else Status.BLOCKED

    def text(self) -> str:
        """The summary in the form of the model-validation document."""
        requested = "Level " + "/".join(map(str, self.requested))
        lines = [f"Result: {self.result.value} - {self._sentence()}"]
        lines += [f"Requested coverage: {requested}", f"Model: {self.model}", "Deliverables:"]
        lines += [self._line("- ", item) for item in self.preliminary]
        for number, title in self.titles.items():
            lines += self._level(number, title)
        lines += [self._line("- ", self.log_capture)] if self.log_capture else []
        lines += ["Evidence:", *(f"- {name}: {value}" for name, value in self.evidence)]
        lines += ["- Key lines:", *(f"  - {name}: {line}" for name, line in self.key_lines)]
        lines += ["Limitations:", *(f"- {text}" for text in self.limitations)]
        return "\n".join([*lines, "Follow-ups:", *(f"- {text}" for text in self._follow_ups()), ""])

    def _of_no_level(self) -> list[Item]:
        return [*self.preliminary, *([self.log_capture] if self.log_capture else [])]

    def _level(self, number: int, title: str) -> list[str]:
        """A level's lines; one that did not run says so, and whether it was asked for."""
        head = f"- Level {number}, {title}"
        level = next((level for level in self.levels if level.number == number), None)
        if level is not None:
            return [f"{head}: {level.status.value}", *(self._line("  - ", item) for item in level.items)]
        if number in self.requested:
            return [f"{head}: {Status.SKIPPED.value} - the program had not come to it"]
        return [f"{head}: Not requested"]

    def _line(self, indent: str, item: Item) -> str:
        log = f" [{self._relative(item.log)}]" if item.log else ""
        reason = "does not fit here: " if item.left_out else ""
        return f"{indent}{item.part}: {item.status.value} - {reason}{item.text}{log}"

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.output) if path.is_relative_to(self.output) else path)

    def _sentence(self) -> str:
        wrong = self._parts(Status.FAIL) or self._parts(Status.BLOCKED)
        passed = self._parts(Status.PASS)
        if self.result is Status.PASS:
            unfit = self._names(lambda item: item.left_out)
            if unfit:
                return f"passed: {passed}; not checked here, though it applies: {unfit}"
            return f"every part that applies passed: {passed}"
        ran = f"passed: {passed or 'nothing'}"
        if self.result is Status.FAIL:
            return f"failed: {wrong}; {ran}"
        ran_at_all = {level.number for level in self.levels if level.status is not Status.SKIPPED}
        left_out = [str(number) for number in self.requested if number not in ran_at_all]
        reasons = [f"could not run here, which is not evidence against the model's support: {wrong}"] if wrong else []
        reasons += [f"not run: level {', '.join(left_out)}"] if left_out else []
        return "; ".join([*reasons, ran])

    def _parts(self, status: Status) -> str:
        of_no_level = [item.part for item in self._of_no_level() if item.status is status is not Status.PASS]
        return "; ".join([*of_no_level, *filter(None, [self._names(lambda item: item.status is status)])])

    def _names(self, wanted: Callable[[Item], bool]) -> str:
        return "; ".join(f"level {x.number}, {item.part}" for x in self.levels for item in x.items if wanted(item))

    def _follow_ups(self) -> list[str]:
        again = "find the cause, run again"
        texts = [f"{item.part}: {again}" for item in self._of_no_level() if item.status is Status.FAIL]
        for level in self.levels:
            for item in level.items:
                if item.status is Status.FAIL:
                    texts.append(f"level {level.number}, {item.part}: {again}")
                elif item.status is Status.BLOCKED:
                    texts.append(f"level {level.number}, {item.part}: run where nothing blocks it")
        unfit = self._names(lambda item: item.left_out)
        return [*texts, *([f"run where it fits: {unfit}"] if unfit else [])] or ["none"]
