"""What a step's results mean: tokens are appended, sequences end, beams are replaced by their children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.types import MEAN, Finish, Logprob, Token
from modelmill.runtime import logprobs
from modelmill.runtime.beams import BeamSearch
from modelmill.runtime.flight import Flight
from modelmill.runtime.logits_processors import processors_of
from modelmill.runtime.sampler import Sampler
from modelmill.runtime.scheduler import Scheduler
from modelmill.runtime.sequence import Sequence


class Ledger:
    """The sequences of every request that is not over, and the counts of tokens.

    live: by request id. searches: beam searches among them. guided: sequences whose next token depends on
    which the last one was, beyond what the model sees.
    """

    def __init__(self, scheduler: Scheduler, sampler: Sampler) -> None:
        self.scheduler, self.sampler = scheduler, sampler
        self.live: dict[str, list[Sequence]] = {}
        self.searches = self.guided = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self._cached: dict[str, int] = {}  # of each live request whose prompt is computed

    def add(self, seqs: list[Sequence]) -> None:
        """A request's sequences; the first is queued and leads the others."""
        leader = seqs[0]
        if leader.beam is not None:
            self.searches += 1
        self.guided += sum(map(_waits, seqs))
        self.live[leader.request.id] = seqs
        self.scheduler.add(leader)

    def settle(self, flight: Flight) -> list[Token]:
        """Read a step's results and move its sequences on."""
        events: list[Token] = []
        ids = flight.read()
        told = self._told(flight)
        for note in flight.prompted:
            assert note.seq.prompt_logprobs is not None
            top = note.seq.request.params.prompt_logprobs or 0
            note.seq.prompt_logprobs.extend(logprobs.read(row, top) for row in note.table.tolist())
        for i, seq in enumerate(flight.seqs):
            if seq.finish is None:
                events.append(self._append(seq, ids[i], told.get(i)))
        for search, logits in flight.beams:
            events += self._search(search, logits)  # type: ignore[arg-type]
        for part in flight.pooled:
            part.seq.pooled = part.total if part.first else part.seq.pooled + part.total  # type: ignore[operator]
        for (seq, _), reached in zip(flight.schedule.work, flight.reached):
            if seq.finish is None:
                self.scheduler.publish(seq)
                # the next step may be under way: what it computes has not been read yet
                if seq.limit <= seq.prompt_len <= reached:
                    events += self._no_answer(seq)
        for seq in flight.schedule.ended:
            if seq.finish is None:
                events += self._exhausted(seq)
        return events

    def _append(self, seq: Sequence, token: int, told: Mapping[int, Logprob] | None) -> Token:
        """One sampled token of one sequence."""
        cached = self._begin(seq)
        seq.pending -= 1
        self.output_tokens += 1
        prompt = None
        if seq.prompt_logprobs is not None and len(seq.tokens) == seq.prompt_len:
            prompt = seq.prompt_logprobs
        seq.tokens.append(token)
        if seq.guide is not None:
            seq.guide.accept(token)
        finish: Finish | None = None
        stop: int | None = None
        said: int | None = token
        if token in seq.stops:
            lost = seq.guide is not None and seq.guide.lost
            finish, stop, said = Finish.ERROR if lost else Finish.STOP, token, None
        elif len(seq.tokens) >= seq.limit:
            finish = Finish.LENGTH
        if finish is not None:
            self.scheduler.publish(seq)
            self.drop(seq, finish)
        request = seq.request.id
        if told is None and prompt is None:
            return Token(request, seq.index, said, None, finish, stop, None, cached)
        return Token(request, seq.index, said, told, finish, stop, prompt, cached)  # type: ignore[arg-type]

    def _begin(self, seq: Sequence) -> int:
        """Count a request's prompt, once however many answers it gets; its tokens that came from the prefix cache.

        Answers that have to compute it again find their own pages there: that saves nothing of what was asked for.
        """
        cached = self._cached.get(seq.request.id)
        if cached is None:
            cached = self._cached[seq.request.id] = seq.cached
            self.prompt_tokens += seq.prompt_len
            self.cached_tokens += cached
        return cached

    def _told(self, flight: Flight) -> dict[int, dict[int, Logprob]]:
        if flight.told is None or flight.plan is None:
            return {}
        params = [s.request.params for s in flight.seqs]
        rows = flight.told.tolist()
        return {i: logprobs.read(row, params[i].logprobs or 0) for i, row in zip(flight.plan.told, rows)}

    def _no_answer(self, seq: Sequence) -> list[Token]:
        """A request for zero tokens: its prompt is computed, that was all."""
        cached = self._begin(seq)
        events = []
        embedding = _embedding(seq)
        for member in [*self.live.get(seq.request.id, ())]:
            prompt: Any = member.prompt_logprobs
            self.drop(member, Finish.LENGTH)
            events.append(
                Token(
                    seq.request.id,
                    member.index,
                    None,
                    None,
                    Finish.LENGTH,
                    prompt_logprobs=prompt,
                    cached_tokens=cached,
                    embedding=embedding,
                )
            )
        return events

    def _exhausted(self, seq: Sequence) -> list[Token]:
        """No page can be found for the only sequence left: it ends here."""
        if isinstance(seq.beam, BeamSearch):
            seq.beam.give_up()
            return self._results(seq.beam)
        cached = self._begin(seq)
        self.drop(seq, Finish.LENGTH)
        return [Token(seq.request.id, seq.index, None, finish=Finish.LENGTH, cached_tokens=cached)]

    def _search(self, search: BeamSearch, logits: torch.Tensor) -> list[Token]:
        """One step of a beam search: its beams are replaced by their children."""
        if search.seqs[0].finish is not None:
            return []
        parents = search.seqs
        self._begin(parents[0])
        children = search.advance(logits)
        if not children:
            return self._results(search)
        used = {child.parent for child in children}
        for i, seq in enumerate(parents):
            self.scheduler.publish(seq)
            if i not in used:
                self.scheduler.remove(seq)
        continued: set[int] = set()
        beams: list[Sequence] = []
        for child in children:
            seq = parents[child.parent]
            if child.parent in continued:
                search.forked += 1
                seq = seq.fork(search.forked, seq.seed)
                self.scheduler.share(parents[child.parent], seq)
                self.scheduler.join(seq)
            continued.add(child.parent)
            beams.append(seq)
        for seq, child in zip(beams, children):
            seq.tokens.append(child.token)
            seq.siblings = beams
        search.seqs = beams
        self.live[parents[0].request.id] = list(beams)
        return []

    def _results(self, search: BeamSearch) -> list[Token]:
        """The search has ended: the n best results, best first."""
        request = search.seqs[0].request
        cached = self._begin(search.seqs[0])
        for seq in list(search.seqs):
            self.drop(seq, Finish.STOP)
        events = []
        for i, found in enumerate(search.results[: request.params.n]):
            self.output_tokens += len(found.tokens) + (found.stop is not None)
            events.append(
                Token(request.id, i, None, None, found.finish, found.stop, None, cached, found.tokens, found.score)
            )
        return events

    def drop(self, seq: Sequence, finish: Finish) -> None:
        """The sequence has ended: everything it held is given back."""
        if seq.finish is not None:
            return
        seq.finish = finish
        if _waits(seq):
            self.guided -= 1
        self.scheduler.remove(seq)
        if seq.beam is None and seq.siblings:
            # they waited for its prompt; now they compute their own
            for other in seq.siblings:
                if other.finish is None:
                    self.scheduler.add(other)
            seq.siblings = []
        self.sampler.forget(seq)
        live = self.live.get(seq.request.id)
        if live is not None and all(s.finish is not None for s in live):
            del self.live[seq.request.id]
            self._cached.pop(seq.request.id, None)
            if seq.beam is not None:
                self.searches -= 1


def _waits(seq: Sequence) -> bool:
    """Whether the host must know a token before the next one can be picked."""
    asked = processors_of(seq)
    return seq.guide is not None or (asked is not None and asked.reads_tokens)


def _embedding(seq: Sequence) -> bytes | None:
    """The pooled state of a prompt, where it was asked for: [H] float32, little endian."""
    if not isinstance(seq.pooled, torch.Tensor):
        return None
    count = seq.prompt_len if seq.request.pooling == MEAN else 1
    return (seq.pooled / count).to(torch.float32).numpy().astype("<f4").tobytes()
