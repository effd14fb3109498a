"""What a buffer filter may choose, and how what it did to the buffer is read."""

from __future__ import annotations

from typing import Any

from slime.data import Group, Sample
from slime.utils.errors import BadInputError


class BufferedGroup(list[Sample]):
    """A group of the buffer, which a filter may also read as one sample of the API document: by its reward."""

    @property
    def reward(self) -> float:
        """The mean of the samples' rewards that are numbers; -inf where there is none, so that it sorts behind all."""
        rewards = [sample.reward for sample in self if isinstance(sample.reward, (int, float))]
        return sum(rewards) / len(rewards) if rewards else float("-inf")


def is_group(value: Any) -> bool:
    """Whether it is a non-empty list of samples."""
    return isinstance(value, list) and bool(value) and all(isinstance(sample, Sample) for sample in value)


class Choice:
    """One call of a buffer filter: it is given `views`, and `settle` reads what it has made of them."""

    def __init__(self, buffer: list[Group], wanted: int, where: str, *, pops: bool) -> None:
        """``where`` is the filter, for messages; with ``pops`` it must take what it returns out of the buffer, as the
        API document's method does not."""
        self.views: list[Any] = [BufferedGroup(group) for group in buffer]
        self._before = {id(view): (view, group) for view, group in zip(self.views, buffer, strict=True)}
        self._wanted, self._where, self._pops = wanted, where, pops
        self.chosen: list[Group] = []
        self.left: list[Group] = []
        """What stays in the buffer."""
        self.made: list[Group] = []
        """Those of `left` that are of the filter's making."""
        self.num_dropped = 0
        """Groups that it took out and did not return."""

    def settle(self, chosen: Any, buffer: list[Any]) -> None:
        """Read what the filter has returned (``chosen``) and what it has left; BadInputError where it may not choose
        so, and then no group has changed."""
        for what, value in (("return", chosen), ("leave", buffer)):
            if not isinstance(value, (list, tuple)):
                raise BadInputError(f"{self._where} must {what} a list of groups, not a {type(value).__name__}")
        taken, left = {id(view) for view in chosen}, {id(view) for view in buffer}
        if len(chosen) > self._wanted or not taken <= self._before.keys():
            raise BadInputError(
                f"{self._where} must return up to {self._wanted} groups of the buffer; it returned {len(chosen)}"
                + ("" if taken <= self._before.keys() else ", not all of them of the buffer")
            )
        if not all(map(is_group, [*chosen, *buffer])):
            raise BadInputError(
                f"{self._where} has emptied a group, or put what is not a list of samples into the buffer"
            )
        if len(taken) < len(chosen) or len(left) < len(buffer):
            raise BadInputError(f"{self._where} has returned a group twice, or left one twice in the buffer")
        if taken & left and self._pops:
            raise BadInputError(f"{self._where} must take the groups that it returns out of the buffer: pop them")
        self.num_dropped = len(self._before.keys() - taken - left)
        self.chosen = [self._own(view) for view in chosen]
        self.left = [self._own(view) for view in buffer if id(view) not in taken]
        self.made = [view for view in buffer if id(view) not in self._before]

    def _own(self, view: Any) -> Group:
        if id(view) not in self._before:
            return view
        group = self._before[id(view)][1]
        group[:] = view  # which the filter may have begun anew
        return group
