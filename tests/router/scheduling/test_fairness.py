"""Clients that share the server: who is next, by what each was served. The queue alone, then the whole scheduler."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scheduling import Link, MemorySink, joined, make_request, open_text, submit
from tests.fakes.scripted_shard import PlainShard
from tgi.errors import Unavailable
from tgi.router.scheduling import fairness
from tgi.router.scheduling.entry import Entry, State
from tgi.router.scheduling.fairness import (
    INPUT_WEIGHT,
    MOST_REMEMBERED,
    OUTPUT_WEIGHT,
    Account,
    Ledger,
    Lines,
    place_of,
)
from tgi.router.scheduling.queue import WaitingQueue


@dataclass(frozen=True)
class Ask:
    client: str
    num_prompt: int
    num_answer: int = 1


asks = st.builds(Ask, st.sampled_from(["a", "b", "c"]), st.integers(1, 60), st.integers(1, 40))


def entry(sequence: int, client: str = "", num_prompt: int = 10, priority: int = 0) -> Entry:
    request = make_request(range(num_prompt), client=client, priority=priority)
    return Entry(request, MemorySink(), open_text(request), sequence, 0.0, lambda entry: None)


def filled(*clients: str) -> tuple[WaitingQueue, list[Entry]]:
    queue = WaitingQueue(lambda: 0.0)
    entries = [entry(sequence, client) for sequence, client in enumerate(clients)]
    for one in entries:
        queue.append(one)
    return queue, entries


def serve_all(queue: WaitingQueue, most: int) -> list[Entry]:
    """One look that starts `most` entries, each with its whole prompt to compute."""
    served: list[Entry] = []
    for one in queue:
        if len(served) == most:
            break
        queue.serve(one, one.num_prompt)
        served.append(one)
    for one in served:
        queue.remove(one)
    return served


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_clients_take_turns_within_one_look() -> None:
    queue, _ = filled("flood", "flood", "flood", "flood", "quiet", "quiet")
    assert [one.sequence for one in serve_all(queue, 6)] == [0, 4, 1, 5, 2, 3]


def test_the_nameless_are_one_client() -> None:
    queue, _ = filled("", "", "", "quiet")
    assert [one.sequence for one in serve_all(queue, 4)] == [0, 3, 1, 2]


def test_tokens_count_not_requests() -> None:
    queue = WaitingQueue(lambda: 0.0)
    for sequence in range(4):
        queue.append(entry(sequence, "long", num_prompt=40))
    for sequence in range(4, 16):
        queue.append(entry(sequence, "short", num_prompt=10))
    assert Counter(one.request.client for one in serve_all(queue, 10)) == {"long": 2, "short": 8}


def test_who_was_passed_over_stays_where_it_is() -> None:
    """What does not start is not charged: the next of the same client is tried, and the order stays."""
    queue, entries = filled("a", "b", "a", "b")
    assert list(queue) == [entries[index] for index in (0, 1, 2, 3)]
    assert list(queue) == [entries[index] for index in (0, 1, 2, 3)]


def test_a_pause_earns_nothing_and_costs_nothing() -> None:
    queue = WaitingQueue(lambda: 0.0)
    idle = entry(0, "idle")
    queue.append(idle)
    serve_all(queue, 1)
    for sequence in range(1, 40):
        queue.append(entry(sequence, "busy"))
    serve_all(queue, 30)
    for sequence in range(40, 50):
        queue.append(entry(sequence, "idle"))
    clients = [one.request.client for one in serve_all(queue, 8)]
    assert Counter(clients) == {"busy": 4, "idle": 4}, "lifted to the one who waits, and no further"


def test_in_an_empty_queue_a_newcomer_starts_where_the_last_one_stood() -> None:
    queue = WaitingQueue(lambda: 0.0)
    running = [entry(sequence, "busy") for sequence in range(5)]  # kept: its account lives on
    for one in running:
        queue.append(one)
    serve_all(queue, 5)
    for sequence in range(5, 11):
        queue.append(entry(sequence, "new"))
    for sequence in range(11, 17):
        queue.append(entry(sequence, "busy"))
    assert running[0].account.served == 50
    assert Counter(one.request.client for one in serve_all(queue, 6)) == {"new": 3, "busy": 3}


def test_who_returns_goes_first_whatever_its_client_was_served_and_is_not_charged_again() -> None:
    queue, entries = filled("greedy", "modest", "modest")
    (first,) = serve_all(queue, 1)
    assert first is entries[0]
    charged = first.account.served
    queue.put_back(first)
    assert next(iter(queue)) is first
    queue.serve(first, 1_000)
    queue.remove(first)
    assert first.account.served == charged


def test_each_priority_has_its_own_accounts() -> None:
    queue = WaitingQueue(lambda: 0.0)
    for sequence in range(4):
        queue.append(entry(sequence, "a", priority=1))
    serve_all(queue, 4)
    queue.append(entry(4, "b"))
    queue.append(entry(5, "a"))
    queue.append(entry(6, "b"))
    assert [one.sequence for one in queue] == [4, 5, 6], "what it was served at another priority does not count"


def test_names_do_not_pile_up() -> None:
    ledger = Ledger()
    for number in range(3 * MOST_REMEMBERED):
        account = ledger.account(0, f"client {number}")
        ledger.join(account, None)
        ledger.leave(account)
    gc.collect()
    assert len(ledger) == MOST_REMEMBERED
    kept = ledger.account(0, "kept")
    assert ledger.account(0, "kept") is kept
    assert ledger.account(1, "kept") is not kept
    assert len(ledger) == MOST_REMEMBERED + 1


def test_who_asks_one_thing_after_the_other_is_not_new_each_time() -> None:
    """Nothing in flight for a moment does not undo what it was served."""
    queue = WaitingQueue(lambda: 0.0)
    for sequence in range(100):
        queue.append(entry(sequence, "many", num_prompt=10))
    asks_at = {"one": 100, "other": 100, "third": 100}
    served: Counter[str] = Counter()
    for now in range(100, 220):
        for number, (client, at) in enumerate(asks_at.items()):
            if at == now:
                queue.append(entry(3 * now + number, client, num_prompt=90))
        ((client, size),) = [(one.request.client, one.num_prompt) for one in serve_all(queue, 1)]
        served[client] += size
        if client in asks_at:
            asks_at[client] = now + 3  # others have left meanwhile
    assert served == {"many": 900, "one": 900, "other": 900, "third": 900}


def test_a_look_at_the_first_few_costs_the_same_however_many_clients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _ = filled(*map(str, range(2_000)))
    places: list[Entry] = []

    def spy(head: Entry) -> tuple[int, int]:
        places.append(head)
        return place_of(head)

    monkeypatch.setattr(fairness, "place_of", spy)
    assert [one.sequence for one in serve_all(queue, 8)] == [*range(8)]
    queue.append(entry(2_000, "new"))
    assert next(iter(queue)).sequence == 8
    assert len(places) < 80


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "leave", "charge"]), st.sampled_from("abcdefgh"), st.integers(1, 50)),
        max_size=80,
    )
)
def test_the_order_is_that_of_a_sort_whatever_was_charged_meanwhile(operations: list[tuple[str, str, int]]) -> None:
    lines, accounts = Lines(), defaultdict(Account)
    waiting: list[Entry] = []
    for sequence, (kind, client, size) in enumerate(operations):
        if kind == "add":
            one = entry(sequence, client)
            one.account = accounts[client]
            lines.add(client, one)
            waiting.append(one)
        elif kind == "charge":
            accounts[client].charge_prompt(size)
        elif waiting:
            one = waiting.pop(size % len(waiting))
            lines.remove(one.request.client, one)
        # Nothing is charged during the look, so each line stays where its next one puts it.
        assert list(lines) == sorted(waiting, key=place_of)
        heads = sorted((line.head for line in lines.values()), key=place_of)
        assert lines.least_served() is (heads[0].account if heads else None)


@given(st.lists(st.tuples(st.sampled_from(["serve", "add"]), st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_whatever_comes_each_client_is_served_in_its_order_and_the_least_served_first(
    operations: list[tuple[str, str, int]],
) -> None:
    queue = WaitingQueue(lambda: 0.0)
    waiting: dict[str, list[Entry]] = defaultdict(list)
    for sequence, (kind, client, size) in enumerate(operations):
        if kind == "add":
            one = entry(sequence, client, size)
            queue.append(one)
            waiting[client].append(one)
            continue
        heads = [line[0] for line in waiting.values() if line]
        served = serve_all(queue, 1)
        assert bool(served) == bool(heads), "somebody waits and nobody is served"
        for one in served:
            before = one.account.served - one.num_prompt
            assert waiting[one.request.client].pop(0) is one
            assert all(before <= head.account.served for head in heads if head is not one)
    assert len(queue) == sum(map(len, waiting.values()))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 10))
def test_with_one_client_it_is_first_come_first_served(sizes: list[int], at_once: int) -> None:
    queue = WaitingQueue(lambda: 0.0)
    for sequence, size in enumerate(sizes):
        queue.append(entry(sequence, "only", size))
    order: list[int] = []
    while queue:
        order += [one.sequence for one in serve_all(queue, at_once)]
    assert order == list(range(len(sizes)))


# -- the scheduler -----------------------------------------------------------------------------------------------------


def served(entries: Sequence[Entry], client: str) -> int:
    """Weighted tokens, counted from outside: nothing is cached here, and nobody gives way."""
    mine = [one for one in entries if one.request.client == client and one.admitted_at is not None]
    return sum(INPUT_WEIGHT * one.num_prompt + OUTPUT_WEIGHT * len(one.generated) for one in mine)


def ask(link: Link, wanted: Ask, priority: int = 0) -> Entry:
    request = make_request(
        range(wanted.num_prompt),
        wanted.num_answer,
        client=wanted.client,
        priority=priority,
        ignore_eos=True,
        use_cache=False,
    )
    return submit(link, request)[0]


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 40)),
    st.tuples(st.integers(1, 60), st.integers(1, 40)),
    st.integers(1, 6),
    st.integers(0, 8),
)
def test_of_two_that_always_wait_none_gets_far_ahead(
    shape_a: tuple[int, int], shape_b: tuple[int, int], max_rows: int, flood: int
) -> None:
    """The bound of the paper's theorem: 2 max(w_p L, w_q M), L the longest prompt, M what may run at once."""
    shapes = {"a": shape_a, "b": shape_b}
    link = joined(PlainShard(max_rows=max_rows, num_blocks=2_000, prefill_budget=64))
    entries: list[Entry] = []
    longest = max(num_prompt for num_prompt, _ in shapes.values())
    most_running = max_rows * max(sum(shape) for shape in shapes.values())
    bound = 2 * max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * most_running)
    for _ in range(60):
        waiting = Counter(one.request.client for one in link.core.queue)
        for client, least in (("a", 2 * max_rows + flood), ("b", 2 * max_rows)):
            entries += [ask(link, Ask(client, *shapes[client])) for _ in range(least - waiting[client])]
        link.round()
        assert abs(served(entries, "a") - served(entries, "b")) <= bound
    link.core.fail_all(Unavailable("the end"))


def test_a_flood_does_not_keep_a_quiet_client_waiting() -> None:
    link = joined(PlainShard(max_rows=2, num_blocks=2_000))
    flood = [ask(link, Ask("flood", 10, 20)) for _ in range(50)]
    link.round()
    quiet = [ask(link, Ask("quiet", 10, 20)) for _ in range(2)]
    link.until(lambda: all(one.state is State.ENDED for one in quiet))
    assert sum(one.admitted_at is not None for one in flood) <= 6
    link.run()


def test_generated_tokens_are_charged_as_they_come() -> None:
    link = joined()
    one = ask(link, Ask("a", 10, 8))
    link.until(lambda: len(one.generated) == 5)
    assert one.account.served == 10 * INPUT_WEIGHT + 5 * OUTPUT_WEIGHT
    link.run()
    assert one.account.served == 10 * INPUT_WEIGHT + 8 * OUTPUT_WEIGHT


def test_what_is_found_in_the_cache_is_not_charged() -> None:
    link = joined(PlainShard(block_size=16))
    prompt = [index % 50 for index in range(100)]
    first, _ = submit(link, make_request(prompt, 1, client="a"))
    link.run()
    second, _ = submit(link, make_request(prompt, 1, client="b"))
    before = second.account.served
    link.run()
    assert first.account.served == 100 * INPUT_WEIGHT + OUTPUT_WEIGHT
    assert second.account.served - before == 4 * INPUT_WEIGHT + OUTPUT_WEIGHT


def test_giving_way_is_not_charged() -> None:
    link = joined()
    one = ask(link, Ask("a", 20, 30))
    link.until(lambda: len(one.generated) == 10)
    link.core._preempt(one)
    link.run()
    assert one.account.served == 20 * INPUT_WEIGHT + 30 * OUTPUT_WEIGHT


@given(st.lists(st.tuples(asks, st.sampled_from([0, 0, 3, -2])), min_size=1, max_size=25), st.integers(1, 4))
def test_nobody_starves_and_no_row_stays_idle(wanted: list[tuple[Ask, int]], max_rows: int) -> None:
    """Any mixture of clients, priorities and sizes in a pool that the largest nearly fill."""
    link = joined(PlainShard(max_rows=max_rows, num_blocks=30, block_size=4, prefill_budget=32))
    entries = [ask(link, one, priority=priority) for one, priority in wanted]
    for _ in range(5_000):
        if not link.round():
            break
        assert link.core.rows or not link.core.queue, "memory is free, somebody waits, and nobody runs"
    link.check()
    assert all(one.state is State.ENDED for one in entries)
    assert all(len(one.generated) == one.request.stopping.max_new_tokens for one in entries)


@given(st.lists(asks, min_size=1, max_size=20), st.integers(1, 3))
def test_within_a_client_arrival_decides(wanted: list[Ask], max_rows: int) -> None:
    link = joined(PlainShard(max_rows=max_rows, num_blocks=2_000))
    started: dict[str, list[int]] = defaultdict(list)
    link.core._start = _noting(link, started)  # pyright: ignore[reportAttributeAccessIssue]
    for one in wanted:
        ask(link, one)
    link.run()
    assert sum(map(len, started.values())) == len(wanted)
    assert all(order == sorted(order) for order in started.values())


def _noting(link: Link, started: dict[str, list[int]]) -> Callable[[Entry], None]:
    start = link.core._start

    def note(entry: Entry) -> None:
        started[entry.request.client].append(entry.sequence)
        start(entry)

    return note


@pytest.mark.parametrize("names", [["", "", ""], ["x", "x", "x"]])
def test_an_account_is_shared_by_the_requests_of_a_client(names: list[str]) -> None:
    queue, entries = filled(*names)
    accounts = {id(one.account) for one in entries}
    assert len(accounts) == 1
    assert isinstance(entries[0].account, Account)
    assert len(queue) == 3
