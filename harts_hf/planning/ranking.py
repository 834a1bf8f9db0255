"""The order in which drafts of a plan are compared, and which of them are worth more time."""

from .draft import Draft

REFINED = 3  # candidates that are refined, at least
REFINED_BINS = 150  # and as many as hold this many bins together


def rank(draft: Draft, objective: tuple[int, ...]) -> tuple[int, ...]:
    """What plans are compared by: the objectives in order, then fewer slots."""
    values = draft.objectives()
    return (*(values[k] for k in objective), draft.num_slots)


def most_promising(drafts: list[Draft], objective: tuple[int, ...]) -> list[Draft]:
    """The drafts worth refining: the best few, more of them if they are small, and the one of least total work."""
    drafts = sorted(drafts, key=lambda draft: rank(draft, objective))
    return with_least_work(drafts, max(REFINED, REFINED_BINS // len(drafts[0].bins))) if drafts else []


def with_least_work(drafts: list[Draft], count: int) -> list[Draft]:
    """The first few drafts, and the one of least total work: it has most to gain from being evened out."""
    least = min(drafts, key=lambda draft: draft.total_work)
    return drafts[:count] + ([] if any(draft is least for draft in drafts[:count]) else [least])
