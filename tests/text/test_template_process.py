from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from modelmill.core.errors import RequestError, TemplateError
from modelmill.text.template_process import TemplateLimits, TemplateProcess, TemplateRefusedMessages
from tests.wait import time_limit


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(TemplateLimits(seconds=0.3, memory=256 << 20, output=100_000))
    yield process
    process.close()


def test_renders_with_the_rules_templates_are_written_for(process):
    template = (
        "{% for x in xs %}\n  {% if x == 2 %}{% continue %}{% endif %}\n{{ x | tojson "
        "}}\n{% endfor %}"
    )
    assert process.render(template, {"xs": [1, 2, {"é": "<&>"}]}) == '1\n{"é": "<&>"}\n'
    assert process.render("{{ strftime_now('%Y') }}", {}) == time.strftime("%Y")
    assert process.render("{% generation %}a{{ x }}{% endgeneration %}b", {"x": 1}) == "a1b"
    assert process.render("{{ undefined }}|{{ none }}|{{ dict(a=1).a }}", {}) == "|None|1"


def test_the_same_process_serves_again(process):
    process.render("{{ x }}", {"x": 1})
    worker = process._worker
    for number in range(20):
        assert process.render("{{ x }}", {"x": number}) == str(number)
    assert process._worker is worker


HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one long C call": "{{ ('a' * 9999999) | wordwrap(1) | length }}{{ (9**99999) ** 9999 }}",
    "100 MB at once": "{{ 'a' * 100000000 }}",
    "100 MB by and by": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "10 GB": "{{ 'a' * 10000000000 }}",
    "doubling": "{% set n = namespace(a='ab') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a "
    "%}{% endfor %}{{ n.a }}",
    "wide format": "{{ '%999999999d' | format(1) }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "macro recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "include": "{% include '/etc/passwd' %}",
    "changing a list": "{{ x.append(1) }}",
    "syntax": "{% if",
    "no such filter": "{{ 1 | nothing }}",
    "division": "{{ 1 / 0 }}",
    "huge range": "{{ range(10**9) | list }}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_are_one_line_and_the_next_one_works(process, case):
    with time_limit(), pytest.raises(TemplateError) as caught:
        process.render(HOSTILE[case], {"x": [1]})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert process.render("{{ x }}", {"x": 1}) == "1"


def test_attributes_by_name_give_nothing(process):
    template = (
        "{{ ''|attr('__class__') }}{{ '{0.__class__}{0.real}'.format(1) }}{{ x['__class__'] }}"
    )
    assert process.render(template, {"x": {}}) == "1"


def test_the_limits_are_named(process):
    with pytest.raises(TemplateError, match=r"0\.3 s of CPU time"):
        process.render(HOSTILE["loops"], {})
    with pytest.raises(TemplateError, match="more than 100000 characters"):
        process.render(HOSTILE["100 MB by and by"], {})
    with pytest.raises(TemplateError, match="256 MiB of memory"):
        process.render(HOSTILE["10 GB"], {})


def test_a_refusal_is_the_requests_fault(process):
    with pytest.raises(
        TemplateRefusedMessages, match="refused these messages: roles must alternate"
    ) as caught:
        process.render("{{ raise_exception('roles must\n alternate') }}", {})
    assert isinstance(caught.value, RequestError)
    assert isinstance(caught.value, TemplateError)


def test_a_worker_killed_while_idle_is_replaced(process):
    process.render("{{ 1 }}", {})
    worker = process._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert process.render("{{ 2 }}", {}) == "2"
    assert process._worker is not worker


def test_a_worker_that_is_stopped_costs_one_rendering(process, monkeypatch):
    """Its clock stands still with it, so that the caller's has to end it."""
    monkeypatch.setattr("modelmill.text.template_process.WALL_TIME_FACTOR", 1.0)
    monkeypatch.setattr("modelmill.text.template_process.WALL_TIME_GRACE_SECONDS", 0.5)
    process.render("{{ 1 }}", {})
    worker = process._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match="was stopped after"):
        process.render("{{ 2 }}", {})
    assert worker.poll() == -signal.SIGKILL
    monkeypatch.undo()
    assert process.render("{{ 3 }}", {}) == "3"


def test_nothing_is_left_behind():
    process = TemplateProcess()
    process.render("{{ 1 }}", {})
    worker = process._worker
    assert worker is not None
    del process
    assert worker.poll() is not None


def test_threads_take_turns(process):
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = process.render("{{ x }}", {"x": number})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number) for number in range(8)}


def test_large_messages_pass(process):
    big = TemplateProcess(TemplateLimits(output=3 << 20))
    text = "é" * (2 << 20)
    assert big.render("{{ x }}", {"x": text}) == text
    big.close()
