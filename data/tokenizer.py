"""Tokenizers by their spec: text to token ids and back.

A tokenizer travels in manifests and checkpoints as a text, its spec: a key of TOKENIZERS, or JSON
that holds a whole tokenizer.json, so that no other file is needed. data/named_tokenizer.py has the
interface and the tokenizers with a name, data/export_tokenizer.py writes files for other programs.

Everything that a Hugging Face model says about its tokens is gathered here, once: end of text,
further tokens that end a text, and the chat template. Files are untrusted: what cannot be used is
refused with a sentence that names the file.
"""

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Engine
from tokenizers.implementations import ByteLevelBPETokenizer

from data.chat_template import compile_template, template_message
from data.named_tokenizer import TOKENIZER_FILE, TOKENIZERS, Tokenizer
from utils.errors import UserError

MERGES_FILE = "merges.txt"
VOCABULARY_FILE = "vocab.json"  # used with merges.txt before tokenizer.json existed
# A text that tells tokenizers apart, and its ids in the tokenizers that have a name here. Other
# languages have vocabularies of 50,257 tokens, too; a normalizer would change the ligature U+FB01.
PROBE = "Hello naïve  \ufb01 天🐍"
PROBE_IDS = {
    "gpt2": [15496, 41492, 220, 27332, 105, 223, 36469, 102, 8582, 238, 235],
    "bytes": list(PROBE.encode()),
}
# names of end of text in published tokenizers, the most telling first
ENDS_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
# The chats of finetuning/chat.py as a template, for exports: the role is capitalized, and end of
# text precedes each turn, but BOS the first one, and closes the last one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ (bos_token if loop.first else eos_token) + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SPACE = "\u2581"  # SentencePiece (LLaMA) writes this for a space
# messages that show what a chat template writes after an answer
SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "An answer."}


class FileTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, run by the library `tokenizers`.

    Its spec is JSON: "tokenizer.json" is the content of the file and "eot" the end-of-text token;
    "end_ids", "chat_template" and "template_tokens" are those of the Hugging Face model that it
    came with; "name" is a key of TOKENIZERS that has the same tokens, if there is one.
    """

    def __init__(self, spec: str) -> None:
        spec_fields = json.loads(spec)  # written by read_tokenizer
        content = spec_fields[TOKENIZER_FILE]
        # Text again, for the library; ensure_ascii would write \u escapes in place of characters.
        self.tokenizer_json = json.dumps(content, ensure_ascii=False)
        engine = make_engine(self.tokenizer_json)
        self.engine = engine
        self.bos_ids = find_bos_ids(engine)  # () if there is no BOS
        self.end_of_text = spec_fields["eot"]  # the token; self.eot is its id

        # Two files with the same content, BOS included, are the same tokenizer, wherever they lie.
        checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        self.name = spec_fields.get("name", f"tokenizer-{checksum:08x}")
        self.identity = self.name
        if self.name not in TOKENIZERS:
            # with another end of text, other tokens separate the documents
            self.identity = f"{self.name} with {self.end_of_text}"

        vocab = engine.get_vocab()  # ids by token, added tokens included
        self.vocab_size = max(vocab.values()) + 1  # not len(vocab): ids may have gaps
        self.eot = vocab[self.end_of_text]
        self.added_ids = set(engine.get_added_tokens_decoder())
        """Ids of added tokens, which are not made of the pieces of the vocabulary: special tokens
        and others."""

        self.chat_template = spec_fields["chat_template"]
        self.template_tokens: dict[str, str] = spec_fields["template_tokens"]
        """Strings that the chat template may insert, by the name of their variable."""
        # A chat template needs the model's own strings. Without one, only exports read these.
        if not self.chat_template:
            self.template_tokens["bos_token"] = engine.id_to_token(self.start_ids[0])
            self.template_tokens.setdefault("eos_token", self.end_of_text)

        self.turn_end = self.eot
        """Id of the token that ends an answer of a chat."""
        if self.chat_template:
            self.turn_end = self.find_turn_end()
        # start_ids[0]: the model has learned that a document ends where the next one begins
        end_ids = [self.eot, self.turn_end, self.start_ids[0]]
        self.end_ids = frozenset(end_ids + spec_fields["end_ids"])

        # A pre-tokenizer or decoder of type ByteLevel tells that tokens are bytes. A post-processor
        # of this type only moves offsets, and files of other vocabularies have it, too.
        components = json.dumps({**content, "post_processor": None})
        # no token looks like this, as json.dumps writes \" for a quote within a token
        is_byte_level = '"type": "ByteLevel"' in components
        self.bytes_of_id = self.find_bytes(vocab, is_byte_level)
        """Bytes that each id decodes to; none for end of text and BOS."""

    def find_bytes(self, vocab: dict[str, int], is_byte_level: bool) -> dict[int, bytes]:
        """Return the bytes of each id. Raise KeyError for a byte-level token with a character that
        stands for none.

        The decoder of the file is not asked: it gives strings, in which a character that spans two
        tokens is lost, and some files have none.
        """
        # The inverse of byte_characters: "Ġ" stands for a space, byte 32.
        byte_of_character = {character: i for i, character in enumerate(byte_characters())}
        bytes_of_id: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            if is_byte_level and token_id not in self.added_ids:
                # one character stands for each byte; added tokens are plain text
                token_bytes = bytes(byte_of_character[character] for character in token)
            elif token.startswith("<0x") and len(token) == 6:  # byte fallback, as <0x0A>
                token_bytes = bytes([int(token[3:5], 16)])
            else:  # plain text, or a token of SentencePiece
                token_bytes = token.replace(SPACE, " ").encode()
            bytes_of_id[token_id] = token_bytes
        for token_id in (self.eot, *self.start_ids):
            bytes_of_id[token_id] = b""
        return bytes_of_id

    @cached_property
    def continuing_engine(self) -> Engine:
        """The engine without what puts a space, or a mark for one, before a text."""
        # json.loads calls the hook for each object, however deep in a sequence of components
        content = json.loads(self.tokenizer_json, object_hook=without_prefix)
        return make_engine(json.dumps(content))

    def encode(self, text: str) -> np.ndarray:
        return encode_with(self.engine, text)

    def encode_continuation(self, text: str) -> np.ndarray:
        return encode_with(self.continuing_engine, text)

    def encode_dialog(self, text: str) -> list[int]:
        """Return the token ids of a text of `render`: a special token's name is this token."""
        # An assignment fails while another thread encodes. Threads encode documents only.
        # True would read special tokens as text.
        self.engine.encode_special_tokens = False
        ids = self.engine.encode(text, add_special_tokens=False).ids
        self.engine.encode_special_tokens = True
        return ids

    def decode_bytes(self, ids: list[int]) -> bytes:
        # A model may have ids that its tokenizer lacks, such as rows of padding.
        return b"".join(self.bytes_of_id.get(token, b"") for token in ids)

    def render(self, messages: list[dict[str, Any]], open_turn: bool = False) -> str:
        """Return a dialog as text by the chat template; with `open_turn`, up to the place where
        the assistant's next answer begins. Raise UserError where the template cannot write it."""
        assert self.chat_template
        variables = {  # variables that transformers gives to a template
            "messages": [template_message(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": open_turn,
        }
        try:
            template = compile_template(self.chat_template)
            return template.render(variables, **self.template_tokens)
        except Exception as error:  # untrusted code can raise anything
            reason = " ".join(str(error).split())  # as one line
            raise UserError(f"the chat template of {self.name} fails: {reason}") from error

    def find_turn_end(self) -> int:
        """Return the id of the token, as <|im_end|>, that the chat template writes after an answer;
        end of text if it writes no special token there. Raise UserError if it writes no dialog."""
        try:
            text = self.render([QUESTION, ANSWER])
        except UserError:  # some templates demand a system message, others refuse one
            text = self.render([SYSTEM, QUESTION, ANSWER])
        after_answer = text.rpartition(ANSWER["content"])[2]  # e.g. "<|im_end|>\n"
        # white space may come before the special token, as in Llama 2's template
        for token_id in self.encode_dialog(after_answer):
            if token_id in self.added_ids:
                return token_id
        return self.eot

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        # errors="replace" gives U+FFFD where bytes of a character are lost
        decoded = self.decode_bytes(ids.tolist()).decode(errors="replace")
        # Many tokenizers put a space before the first word.
        if decoded in (text, f" {text}"):
            return ""
        # What a normalizer does, such as lower-casing or composing characters, is intended and
        # counts as no loss. Other lost characters were dropped by a pre-tokenizer, such as white
        # space, or have no token.
        if self.engine.normalizer is not None:
            text = self.engine.normalizer.normalize_str(text)
        # The characters that `text` has more of. The difference of Counters ignores those that
        # `decoded` has more of, such as an added space.
        lost_counts = Counter(text.replace(SPACE, " ")) - Counter(decoded)
        return "".join(lost_counts.elements())


@cache  # building the tables of a large tokenizer.json takes a second
def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec. Raise UserError if that of GPT-2 cannot be downloaded, and
    what FileTokenizer raises for a tokenizer.json that cannot be used."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec]()
    return FileTokenizer(spec)


def tokenizer_identity(spec: str) -> str:
    """Return Tokenizer.identity of a spec, without a download."""
    # for "gpt2" and "bytes" the identity is the spec
    return spec if spec in TOKENIZERS else load_tokenizer(spec).identity


def count_tokens(spec: str) -> int:
    """Return Tokenizer.vocab_size of a spec, without a download."""
    # the classes of "gpt2" and "bytes" have vocab_size: no instance is needed
    tokenizer = TOKENIZERS[spec] if spec in TOKENIZERS else load_tokenizer(spec)
    return tokenizer.vocab_size


def make_engine(tokenizer_json: str) -> Engine:
    """Return the tokenizer of a tokenizer.json, without the truncation and padding that it may ask
    for, and with special tokens in a text read as text."""
    engine = Engine.from_str(tokenizer_json)
    engine.no_truncation()  # some files ask for 512 tokens
    engine.no_padding()
    engine.encode_special_tokens = True  # the library's name for "as text"
    return engine


def encode_with(engine: Engine, text: str) -> np.ndarray:
    """Return the token ids of a text, uint32 (n,), without BOS."""
    # encode_batch_fast frees Python's interpreter lock, so that threads of data/fineweb-edu.py work
    # at once; encode does not
    (encoding,) = engine.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, np.uint32)


def find_bos_ids(engine: Engine) -> tuple[int, ...]:
    """Return the ids that the post-processor of a tokenizer.json writes before a text.

    The library is asked, as several kinds of post-processors write them. A text that it has no
    token for would not tell what stands before and what after it.
    """
    # the probe, or else the first token that encodes to at least one id
    for text in (PROBE, *engine.get_vocab()):
        encoding = engine.encode(text)  # includes what the post-processor adds
        if 0 in encoding.sequence_ids:  # 0: from the text; None: from the post-processor
            return tuple(encoding.ids[: encoding.sequence_ids.index(0)])
    return ()  # no text has a token


def without_prefix(component: dict) -> dict:
    """Return a component of a tokenizer.json (normalizer, pre-tokenizer, ...) without its option to
    put something before each text."""
    component_type = component.get("type")
    if component_type == "Prepend":  # Llama 2's normalizer
        component["prepend"] = ""
    if component_type in ("ByteLevel", "Metaspace"):
        component["add_prefix_space"] = False
    if component_type == "Metaspace":
        # Newer files have prepend_scheme instead of add_prefix_space.
        component["prepend_scheme"] = "never"
    return component


def byte_characters() -> list[str]:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255.

    A printable character of Latin-1 stands for its own byte, and the n-th character from U+0100 on
    for the n-th of the other bytes (bytes_to_unicode of GPT-2's encoder.py).
    """
    characters: list[str] = []
    num_others = 0  # bytes so far that are not printable
    for byte in range(256):
        character = chr(byte)
        if character.isprintable() and character != " ":
            characters.append(character)
        else:
            characters.append(chr(0x100 + num_others))
            num_others += 1
    return characters


def read_tokenizer(
    path: Path,
    end_of_text: str | int | None = None,
    chat_template: str | None = None,
    end_ids: Sequence[int] = (),
    template_tokens: dict[str, str] | None = None,
) -> str:
    """Return the spec of a tokenizer.json; raise UserError if it cannot be used.

    `end_of_text` is the token or its id; without it, one of ENDS_OF_TEXT. A generated text ends
    with that token, with one of `end_ids`, or with the token that the chat template writes after
    an answer. `template_tokens` are the template's bos_token, eos_token, ...
    """
    try:
        if path.name == VOCABULARY_FILE:
            # vocab.json and merges.txt, joined as JSON of the newer format
            content = ByteLevelBPETokenizer(str(path), str(path.with_name(MERGES_FILE))).to_str()
        else:
            content = path.read_text(encoding="utf-8")
        engine = make_engine(content)
        vocab = engine.get_vocab()
        end_token = find_end_of_text(vocab, end_of_text)
        eot = vocab[end_token]
        spec_fields = {  # read by FileTokenizer
            "eot": end_token,
            "end_ids": list(end_ids),
            "chat_template": chat_template,
            "template_tokens": template_tokens or {},
            TOKENIZER_FILE: json.loads(content),
        }
        # A tokenizer with the tokens of a key in TOKENIZERS has that key as its spec, so that
        # shards, checkpoints and models of other projects agree. Only other end ids or a template
        # need the file.
        name = find_known_name(engine, eot)  # "gpt2", "bytes" or None
        if name and not find_bos_ids(engine):  # named tokenizers write no BOS
            # A name implies one end of text, and no chat template or CHAT_TEMPLATE.
            has_one_end = set(end_ids) <= {eot}
            if has_one_end and chat_template in (None, CHAT_TEMPLATE):
                return name
            spec_fields["name"] = name  # same tokens: shards of that name fit
        spec = json.dumps(spec_fields)
        # Raises for a vocabulary or a chat template that cannot be used.
        load_tokenizer(spec)
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{path} is no tokenizer that can be used: {error}") from error
    return spec


def find_end_of_text(vocab: dict[str, int], end_of_text: str | int | None) -> str:
    """Return the end-of-text token of a vocabulary; raise ValueError if it has none.

    An id that the vocabulary lacks does not count: transformers writes GPT-2's 50256 as a default
    into the config.json of GPT-2s of any vocabulary.
    """
    for token, token_id in vocab.items():
        if end_of_text in (token, token_id):
            return token
    if not isinstance(end_of_text, str):  # a token that the user named must exist
        for token in ENDS_OF_TEXT:
            if token in vocab:
                return token
    raise ValueError(f"no end of text {end_of_text or ''}; name it by --end_of_text TOKEN")


def find_known_name(engine: Engine, eot: int) -> str | None:
    """Return the key of TOKENIZERS that has the same tokens, None if there is none."""
    for name, known in TOKENIZERS.items():
        has_same_size = engine.get_vocab_size() == known.vocab_size and eot == known.eot
        # Size and eot are not enough: a vocabulary of another language, or a normalizer, gives the
        # probe other ids.
        if has_same_size and encode_with(engine, PROBE).tolist() == PROBE_IDS[name]:
            return name
    return None


def pretrained_tokenizer(folder: Path, vocab_size: int) -> str:
    """Return the spec of the tokenizer of a Hugging Face model, or of a file that has weights
    alone. `vocab_size` is the number of rows of its embedding. Raise UserError if there is no
    tokenizer, or one that cannot be used."""
    path = folder / TOKENIZER_FILE
    if not path.is_file() and (folder / MERGES_FILE).is_file():
        path = folder / VOCABULARY_FILE  # read_tokenizer finds MERGES_FILE beside it
    if not path.is_file():  # some GPT-2 models come without a tokenizer
        if vocab_size == 50_304:  # GPT-2's, padded for fast matmuls
            vocab_size = 50_257
        for name, known in TOKENIZERS.items():
            if known.vocab_size == vocab_size:
                return name  # the size is the only evidence
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE} for its {vocab_size:,} tokens, which are neither "
            "GPT-2's (50,257, or 50,304 with padding) nor bytes (257)"
        )

    # Each eos_token_id, a number or a list in either file, ends a text; the first is end of text.
    end_ids: list[int] = []
    for file_name in ("config.json", "generation_config.json"):
        eos = read_json(folder / file_name).get("eos_token_id")
        if isinstance(eos, list):
            end_ids += eos
        elif eos is not None:
            end_ids.append(eos)

    tokenizer_config = read_json(folder / "tokenizer_config.json")
    template_tokens: dict[str, str] = {}  # e.g. "bos_token": "<s>"
    for name, token in tokenizer_config.items():
        if isinstance(token, dict):  # a token with its properties
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str):
            template_tokens[name] = token
    template = tokenizer_config.get("chat_template")  # None for a model of plain text
    if isinstance(template, list):  # several templates by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    template_path = folder / "chat_template.jinja"  # newer transformers write this file
    if template_path.is_file():  # preferred over the JSON, as in transformers
        template = template_path.read_text(encoding="utf-8")

    end_of_text = end_ids[0] if end_ids else None
    return read_tokenizer(path, end_of_text, template, end_ids, template_tokens)


def read_json(path: Path) -> dict:
    """Return the content of a JSON file, {} if the file is missing."""
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))
