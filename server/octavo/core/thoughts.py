"""Follow the thoughts of one sequence, token by token, up to their budget."""

from __future__ import annotations

from octavo.interface.thoughts import ThoughtBudget


class ThoughtWatch:
    """Tells when a sequence's thoughts have used up their budget.

    It watches until they end, by themselves or by the budget. ``num_dropped``: steps that were in flight when the
    budget was used up, whose tokens do not count.
    """

    __slots__ = ("_began", "_recent", "budget", "is_over", "num_dropped")

    def __init__(self, budget: ThoughtBudget) -> None:
        self.budget = budget
        self.is_over = False
        self.num_dropped = 0
        self._began = None if budget.begins else 0  # output tokens before the thoughts
        self._recent: list[int] = []  # as many as the longer tag has

    def take(self, token_ids: list[int], num_before: int) -> int | None:
        """The number of ``token_ids``, which follow ``num_before`` output tokens, that the budget leaves; None while it
        is not used up."""
        for i, token_id in enumerate(token_ids):
            if self._is_used_up(num_before + i):
                return i
            self._recent.append(token_id)
            tag = self.budget.begins if self._began is None else self.budget.ends
            if self._recent[-len(tag) :] != tag:
                continue
            self._recent = []
            if self._began is not None:
                self.is_over = True
                return None
            self._began = num_before + i + 1
        most = max(len(self.budget.begins), len(self.budget.ends))
        self._recent = self._recent[-most:]
        return len(token_ids) if self._is_used_up(num_before + len(token_ids)) else None

    def _is_used_up(self, num_output: int) -> bool:
        return self._began is not None and num_output - self._began >= self.budget.num_tokens
