from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text.utf8 import REPLACEMENT, Utf8Stream

# bytes from the places where UTF-8 decoders differ: lead bytes, continuation bytes, overlongs,
# surrogates
NASTY = st.lists(
    st.sampled_from(
        [0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0xF4]
    )
)


@settings(deadline=None)
@given(NASTY.map(bytes) | st.binary(), st.data())
def test_any_cut_gives_what_python_gives(data, draw):
    stream = Utf8Stream()
    text, at = "", 0
    while at < len(data):
        size = draw.draw(st.integers(1, len(data) - at))
        text += stream.push(data[at : at + size])
        at += size
    assert text + stream.flush() == data.decode("utf-8", errors="replace")


@settings(deadline=None)
@given(NASTY.map(bytes) | st.binary())
def test_each_byte_counts_every_broken_byte(data):
    stream = Utf8Stream(each_byte=True)
    text = "".join(stream.push(bytes([byte])) for byte in data) + stream.flush()
    valid_text = text.replace(REPLACEMENT, "")
    genuine = data.decode("utf-8", errors="ignore").count(REPLACEMENT)
    assert valid_text == data.decode("utf-8", errors="ignore").replace(REPLACEMENT, "")
    assert text.count(REPLACEMENT) - genuine == len(data) - len(
        data.decode("utf-8", errors="ignore").encode()
    )


def test_never_holds_back_a_finished_character():
    stream = Utf8Stream()
    assert [stream.push(bytes([byte])) for byte in "é🦙a".encode()] == [
        "",
        "é",
        "",
        "",
        "",
        "🦙",
        "a",
    ]
