r"""How text is cut into words before merging, by the names of a GGUF's tokenizer.ggml.pre.

Each cut is a regular expression: its matches become pieces, and so does what lies between them. A
sequence of cuts is applied one after another, each to the pieces that the ones before left. The
expressions are those of the models' own tokenizer.json or tiktoken files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITESPACE_PATTERN = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPERCASE_CLASSES = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
LOWERCASE_CLASSES = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
EXCLUDE_HAN = r"&&[^\p{Han}]"
DIGIT_PATTERN = r"\p{N}"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CJK_RUN_PATTERN = r"[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITESPACE_PATTERN}"
)
# of DeepSeek LLM: letters of alphabets with capital and small letters
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-"
    "Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-"
    "\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"


def words_pattern(
    digits: str = r"\p{N}{1,3}",
    *,
    letters: str = r"\p{L}",
    contractions: bool = True,
    whitespace: str = WHITESPACE_PATTERN,
) -> str:
    """Words of one case or both, digits, runs of punctuation with line ends, whitespace.

    Args:
        digits: The numbers that are one piece.
        letters: The classes of a word's characters.
        contractions: Whether 's, 't and so on are pieces.
        whitespace: The runs of whitespace that are one piece.
    """
    others = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    parts = (rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+", digits, others, whitespace)
    return "|".join((CONTRACTIONS, *parts) if contractions else parts)


def cased_words_pattern(
    digits: str, *, contractions: bool, but: str = "", slash: bool = True
) -> str:
    """Words that begin anew at a capital letter.

    Args:
        digits: The numbers that are one piece.
        contractions: Whether 's, 't and so on belong to the word before.
        but: Characters that are in no word.
        slash: Whether a slash may follow punctuation, as a line end does.
    """
    upper, lower, before = (
        f"[{UPPERCASE_CLASSES}{but}]",
        f"[{LOWERCASE_CLASSES}{but}]",
        r"[^\r\n\p{L}\p{N}]?",
    )
    end = f"{CONTRACTIONS}?" if contractions else ""
    punctuation = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{'/' if slash else ''}]*"
    return (
        f"{before}{upper}*{lower}+{end}|{before}{upper}+{lower}*{end}|{digits}|{punctuation}"
        f"|{WHITESPACE_PATTERN}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """What tokenizer.ggml.pre stands for.

    Attributes:
        cuts: The regular expressions, in order.
        ignores_merges: Whether a piece that is a token is not merged.
        adds_bos: Whether a prompt begins with BOS where the file does not say it.
        normalizes: Whether text becomes NFC first.
    """

    cuts: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The cuts, then bytes as letters."""
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_GPT2 = PreTokenizer((GPT2_WORDS,))
_DIGITS_FIRST = PreTokenizer((DIGIT_PATTERN, GPT2_WORDS))
_LLAMA3 = PreTokenizer((words_pattern(),), ignores_merges=True, adds_bos=True)
_GLM4 = PreTokenizer((words_pattern(),), ignores_merges=True)
_QWEN2 = PreTokenizer((words_pattern(DIGIT_PATTERN),), normalizes=True)
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", CJK_RUN_PATTERN, DEEPSEEK_V3_WORDS))
_GPT4O = PreTokenizer((cased_words_pattern(r"\p{N}{1,3}", contractions=True),))
_BLOOM = PreTokenizer((BLOOM_WORDS,))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_TINY_AYA = PreTokenizer(
    (r"\d{1,3}(?=(?:\d{3})*\b)", cased_words_pattern(r"\p{N}{1,3}", contractions=True))
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("", "default", "gpt-2", "gpt2", "phi-2", "jais", "trillion", "granite-docling", "exaone4",
         "gigachat", "a.x-4.0", "mellum"),
        _GPT2,
    ),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((GPT2_WORDS,), normalizes=True)),
    **dict.fromkeys(
        ("smollm", "smollm2", "starcoder", "refact", "codeshell", "exaone", "minerva-7b",
         "mellum2"),
        _DIGITS_FIRST,
    ),
    "command-r": PreTokenizer((DIGIT_PATTERN, GPT2_WORDS), normalizes=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((words_pattern(),))),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", words_pattern(r"\p{N}+")), ignores_merges=True),
    "jais-2": PreTokenizer(
        (
            words_pattern(
                whitespace=r"\s*[\r\n]+|"
                + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
                + r"|\s{1,2}(?!\S)|\s{1}"
            ),
        )
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan",
         "solar-open", "grok-2"),
        _QWEN2,
    ),
    "ufakzeka": PreTokenizer((words_pattern(DIGIT_PATTERN, contractions=False),), normalizes=True),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", words_pattern(DIGIT_PATTERN))),
    "qwen35": PreTokenizer((words_pattern(DIGIT_PATTERN, letters=r"\p{L}\p{M}"),), normalizes=True),
    "seed-coder": PreTokenizer(
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{WHITESPACE_PATTERN}",
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    # o200k's words: in small letters, or capitals before small ones
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "tekken": PreTokenizer(
        (cased_words_pattern(DIGIT_PATTERN, contractions=False),),
        ignores_merges=True,
        adds_bos=True,
    ),
    "youtu": PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            cased_words_pattern(DIGIT_PATTERN, contractions=True),
        ),
        ignores_merges=True,
    ),
    "kimi-k2": PreTokenizer(
        (
            r"[\p{Han}]+|"
            + cased_words_pattern(r"\p{N}{1,3}", contractions=True, but=EXCLUDE_HAN, slash=False),
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT_PATTERN)
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((BLOOM_WORDS, DIGIT_PATTERN)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}  # fmt: skip
"""By tokenizer.ggml.pre, as llama.cpp's converter names them."""
