"""Tokenizers by their spec: text to token ids and back.

The spec of a tokenizer is a string: a key of TOKENIZERS, or JSON with a whole tokenizer.json, so
that no other file is needed. Two specs:

    gpt2
    {"eot": "</s>", "turn_end": "</s>", "end_ids": [2], "chat_template": null,
     "template_tokens": {"bos_token": "<s>"}, "tokenizer.json": {...}}

A tokenizer.json is read as a dict. Of GPT-2's, these entries decide the ids of a text:

    {"added_tokens": [{"id": 50256, "content": "<|endoftext|>", "special": True, ...}],
     "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", ...}, "post_processor": {...},
     "model": {"type": "BPE", "vocab": {"!": 0, ...}, "merges": [["Ġ", "t"], ...], ...}, ...}

Checkpoints hold the spec; manifests hold Tokenizer.name and end_of_text. data/named_tokenizer.py
has the interface and the named tokenizers, data/export_tokenizer.py writes for other programs.

The library `tokenizers` reads a tokenizer.json. transformers reads the other files of a Hugging
Face folder (data/huggingface_tokenizer.py). Files are untrusted: an unusable file is refused with a
sentence that names it.
"""

import json
import logging
import pickle
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend  # the library's class; Tokenizer is our interface
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from data.huggingface_tokenizer import (
    ModelTokens,
    read_folder,
    to_transformers,
    tokenizer_json_says_all,
)
from data.named_tokenizer import TOKENIZER_FILE, TOKENIZERS, ChatTemplate, Tokenizer
from utils.errors import UserError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Names in TOKENIZERS by definition_checksum, to recognize GPT-2's and byte tokenizers in files.
CHECKSUMS = {"a22cd1e0": "gpt2", "be59d73d": "bytes"}
# A text that tells tokenizers apart: a normalizer changes U+FB01, a pre-tokenizer cuts digits.
PROBE = "Hello naïve  \ufb01 天🐍 it's 2026\r\n\tX"
# a folder without these has no tokenizer
TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.json", "tokenizer.model", "tokenizer_config.json")
# end-of-text tokens of published tokenizers, the most specific first
ENDS_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
# The chat format of finetuning/chat.py as a template, for exports. BOS precedes the first turn, end
# of text precedes each other turn and ends the last turn. Roles are capitalized.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ (bos_token if loop.first else eos_token) + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SPACE = "\u2581"  # SentencePiece (LLaMA) writes this for a space
# messages to find out what a chat template writes after an answer
SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "An answer."}


def check_rendered(text: str, messages: list[dict[str, Any]]) -> None:
    """Raise ValueError if `text`, rendered by a template, lacks the content of a message, or has a
    list of parts as Python prints it. finetuning/template.py checks answers."""
    for message in messages:
        # a text, a list of parts, or None of an answer that only calls tools
        content = message.get("content") or ""
        content_texts = [content]
        if isinstance(content, list):  # [{"type": "text", "text": "Hi"}]
            content_texts = [entry["text"] for entry in content]
            if str(content) in text:
                raise ValueError("it takes content as a text, not as parts")
        for content_text in content_texts:
            # a template may write the result of a tool as JSON, in quotes
            stripped = content_text.strip()  # as some templates do
            in_json = json.dumps(stripped, ensure_ascii=False)[1:-1]  # without the quotes around it
            if message["role"] != "assistant" and stripped not in text and in_json not in text:
                raise ValueError(
                    f"it leaves out {content_text[:40]!r} of the role {message['role']}"
                )


class FileTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, run by the library `tokenizers`.

    Its spec is `spec_fields` as JSON, which `make_spec` writes: "tokenizer.json" is the content of
    the file, "eot" the end-of-text token, and "name" the key of TOKENIZERS with the same tokens, if
    there is one. "end_ids", "chat_template", "template_tokens" and "turn_end" come from the Hugging
    Face model of the tokenizer.
    """

    def __init__(self, spec_fields: dict[str, Any]) -> None:
        content = spec_fields[TOKENIZER_FILE]  # {"added_tokens": [...], "model": {...}, ...}
        # Shards and exports get this text, and each backend is made of it. ensure_ascii would write
        # \u escapes in place of characters.
        self.tokenizer_json = json.dumps(content, ensure_ascii=False)
        backend = make_backend(self.tokenizer_json)  # the library's object, which encodes
        self.backend = backend
        self.bos_ids = find_bos_ids(backend)  # (1,) of LLaMA 2, () of GPT-2, which has no BOS
        self.end_of_text = spec_fields["eot"]  # the token; self.eot is its id

        # "tokenizer-8f3a01c2": two files with the same definition are the same tokenizer
        self.name = spec_fields.get("name", f"tokenizer-{definition_checksum(content)}")
        self.identity = self.name  # TokenStream refuses folders whose identities differ
        if self.name not in TOKENIZERS:
            # with another end-of-text token, other tokens separate the documents
            self.identity = f"{self.name} with {self.end_of_text}"

        # ids by token, added tokens included: {"!": 0, ..., "<|endoftext|>": 50256}
        vocab = backend.get_vocab()
        self.vocab_size = max(vocab.values()) + 1  # not len(vocab): ids may have gaps
        self.eot = vocab[self.end_of_text]
        added_tokens = backend.get_added_tokens_decoder()  # the library's AddedToken of each id
        self.added_ids = set(added_tokens)
        """Ids of added tokens, special and others: plain text, not pieces of the vocabulary."""
        # of <|im_start|> and the like, which finetuning/completions.py leaves out of an answer
        self.special_ids = frozenset(i for i, token in added_tokens.items() if token.special)

        template: ChatTemplate | None = spec_fields["chat_template"]  # None without one
        self.is_of_chat_model = template is not None
        # None for CHAT_TEMPLATE, too: finetuning/chat.py writes its format without a template
        self.chat_template = None if template == CHAT_TEMPLATE else template
        self.template_tokens: dict[str, str] = spec_fields["template_tokens"]
        """Special tokens by their names in templates and transformers: bos_token, eos_token, ..."""
        self.turn_end = vocab[spec_fields["turn_end"]]  # of "<|im_end|>", or of end of text
        """Id of the token that ends an answer of a chat."""
        self.end_ids_that_are_text = {self.eot} if has_characters_alone(backend) else set()
        """Only in a vocabulary of characters: the id of end of text, a character. It separates
        documents, but it is also text, and so does not end a generated text."""
        # start_ids[0] is BOS, or end of text without a BOS: the model has learned that a document
        # ends where the next document begins
        end_ids = [self.eot, self.turn_end, self.start_ids[0]]
        # those of the spec are the model's eos_token_id: [128001, 128009] of Llama 3
        self.end_ids = frozenset(end_ids + spec_fields["end_ids"]) - self.end_ids_that_are_text

        # With a pre-tokenizer or decoder of type ByteLevel, tokens are bytes. No token can contain
        # this string, because json.dumps writes \" for a quote within a token.
        is_byte_level = '"type": "ByteLevel"' in self.tokenizer_json
        self.bytes_of_id = self.find_bytes(vocab, is_byte_level)
        """Bytes that each id decodes to; b"" for BOS, and for end of text unless it is in
        end_ids_that_are_text."""

    def find_bytes(self, vocab: dict[str, int], is_byte_level: bool) -> dict[int, bytes]:
        """Return the bytes of each id, given `vocab`, the ids by token.

        Files write the bytes b" the" as "Ġthe" (byte-level BPE) or "▁the" (SentencePiece), and the
        byte of a line break as "Ċ" or "<0x0A>".

        The file's own decoder does not serve: it returns strings, which lose a character that spans
        two tokens. Some files have no decoder.
        """
        # the inverse of byte_characters: "Ġ" stands for a space, byte 32
        byte_of_character = {character: byte for byte, character in enumerate(byte_characters())}
        bytes_of_id: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            is_added = token_id in self.added_ids  # added tokens are plain text
            # Each character stands for one byte. For the library, too, a token with any other
            # character is plain text.
            if is_byte_level and not is_added and byte_of_character.keys() >= set(token):
                token_bytes = bytes(byte_of_character[character] for character in token)
            elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):  # byte fallback: <0x0A>
                token_bytes = bytes([int(token[3:5], 16)])
            else:  # plain text, or a token of SentencePiece, which writes "▁" (SPACE) for a space
                token_bytes = token.replace(SPACE, " ").encode()
            bytes_of_id[token_id] = token_bytes
        # A decoded document shows no "<|endoftext|>" or "<s>". The line break that ends documents
        # in a vocabulary of characters (end_ids_that_are_text) is text, and stays.
        for token_id in {self.eot, *self.start_ids} - self.end_ids_that_are_text:
            bytes_of_id[token_id] = b""
        return bytes_of_id

    @cached_property
    def continuing_backend(self) -> Backend:
        """Backend that puts no space, and no mark for a space, before a text."""
        return make_continuing_backend(self.tokenizer_json)

    def encode(self, text: str) -> np.ndarray:
        return encode_with(self.backend, text)

    def encode_continuation(self, text: str) -> np.ndarray:
        return encode_with(self.continuing_backend, text)

    @cached_property
    def prompt_backends(self) -> tuple[Backend, Backend]:
        """Backends of encode_with_added_tokens: for a text that begins, and for one that follows
        another text."""
        content = json.loads(self.tokenizer_json)
        for entry in content["added_tokens"]:  # {"id": 50256, "content": "<|endoftext|>", ...}
            # make_backend reads special tokens as text, and other added tokens as tokens: so only
            # the name of end of text stays text in a prompt, and "<|im_start|>" becomes its token
            entry["special"] = entry["id"] == self.eot
        prompt_json = json.dumps(content)
        return make_backend(prompt_json), make_continuing_backend(prompt_json)

    def encode_with_added_tokens(self, text: str, *, follows: bool = False) -> np.ndarray:
        beginning_backend, following_backend = self.prompt_backends
        return encode_with(following_backend if follows else beginning_backend, text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the token ids of a rendered dialog: the name of a special token in `text` becomes
        the token."""
        # False: the template alone decides if BOS begins the dialog, as in transformers
        return self.renderer.encode(text, add_special_tokens=False)

    def decode_bytes(self, ids: list[int]) -> bytes:
        # a model may give ids that its tokenizer lacks, because ids may have gaps
        return b"".join(self.bytes_of_id.get(token_id, b"") for token_id in ids)

    @cached_property  # made at its first use, because the import of transformers takes seconds
    def renderer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer as a class of transformers, which renders dialogs by the chat template.
        The template names special tokens by the keys of template_tokens, {"bos_token": "<s>"}."""
        return to_transformers(self.tokenizer_json, self.template_tokens, self.chat_template)

    def render(
        self, messages: list[dict[str, Any]], open_turn: bool = False, tools: list | None = None
    ) -> str:
        """Return a dialog as text by the chat template; with `open_turn`, up to the beginning of
        the assistant's next answer. `tools` are JSON schemas of functions that the assistant may
        call. Raise UserError if the template cannot write the dialog."""
        assert self.chat_template  # callers check: without it finetuning/chat.py writes the dialog
        # "weight" says if an answer is learned; a template might write it into the text
        unweighted_messages: list[dict[str, Any]] = []
        for message in messages:
            fields = {name: value for name, value in message.items() if name != "weight"}
            unweighted_messages.append(fields)  # {"role": "user", "content": "Hi"}
        try:
            text = self.renderer.apply_chat_template(
                unweighted_messages, tools=tools, add_generation_prompt=open_turn, tokenize=False
            )
            assert isinstance(text, str)  # because of tokenize=False
            check_rendered(text, messages)  # ValueError if a text besides answers is missing
            if tools and text == self.render(messages, open_turn):  # the same without tools
                raise ValueError("it writes no tools")
            return text
        except Exception as error:  # untrusted code can raise anything
            reason = " ".join(str(error).split())  # as one line
            raise UserError(f"the chat template of {self.name} fails: {reason}") from error

    def find_turn_end(self) -> str:
        """Return the token that the chat template writes after an answer, such as <|im_end|>; the
        end-of-text token if it writes no special token there. Raise UserError if the template
        cannot write a dialog."""
        try:
            dialog_text = self.render([QUESTION, ANSWER])  # "Hi", and "An answer."
        except UserError:  # some templates demand a system message, others refuse one
            dialog_text = self.render([SYSTEM, QUESTION, ANSWER])
        after_answer = dialog_text.rpartition(ANSWER["content"])[2]  # e.g. "<|im_end|>\n"
        # white space may precede the special token, as in Llama 2's template
        for token_id in self.encode_with_special_tokens(after_answer):
            if token_id in self.added_ids:  # else a piece of text, such as "\n"
                return str(self.backend.id_to_token(token_id))
        return self.end_of_text

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        # errors="replace" gives U+FFFD where bytes of a character are lost
        decoded = self.decode_bytes(ids.tolist()).decode(errors="replace")
        # many tokenizers put a space before the first word
        if decoded in (text, f" {text}"):
            return ""
        # A change by the normalizer, such as lower-casing or composing characters, is intended and
        # not a loss. Other missing characters have no token, or the pre-tokenizer dropped them, as
        # it may drop white space.
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        # Count the characters that `decoded` lacks: "bb" of "abba" and "a a". A difference of
        # Counters ignores characters that `decoded` has in addition, such as the space.
        # SentencePiece decodes a "▁" of the text to a space, which is no loss: compare both texts
        # with spaces for it.
        lost_counts = Counter(text.replace(SPACE, " ")) - Counter(decoded.replace(SPACE, " "))
        return "".join(lost_counts.elements())


@cache  # building the tables of a large tokenizer.json takes a second
def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec. Raise UserError if GPT-2's cannot be downloaded, and the
    errors of FileTokenizer for an unusable tokenizer.json."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec]()
    return FileTokenizer(json.loads(spec))  # the spec is JSON, {"eot": "</s>", ...}


def tokenizer_identity(spec: str) -> str:
    """Return Tokenizer.identity of a spec, without a download, to compare tokenizers."""
    # for "gpt2" and "bytes" the identity is the spec
    return spec if spec in TOKENIZERS else load_tokenizer(spec).identity


def vocab_size_of(spec: str) -> int:
    """Return Tokenizer.vocab_size of a spec, without a download."""
    # for "gpt2" and "bytes" a class, which has vocab_size without an instance
    tokenizer = TOKENIZERS[spec] if spec in TOKENIZERS else load_tokenizer(spec)
    return tokenizer.vocab_size


def make_backend(tokenizer_json: str) -> Backend:
    """Return the Backend, the Tokenizer class of the library `tokenizers`, for the content of a
    tokenizer.json. The Backend ignores truncation, padding and dropout that the file asks for, and
    reads special tokens in a text as text."""
    backend = Backend.from_str(tokenizer_json)
    backend.no_truncation()  # some files ask for 512 tokens
    backend.no_padding()
    if isinstance(backend.model, BPE) and backend.model.dropout:
        note = "note: the tokenizer's dropout would give a text other ids each time: left out"
        logging.getLogger("notes").warning(note)  # to stderr, on the main process only
        backend.model.dropout = None
    backend.encode_special_tokens = True  # the library's name for "as text"
    return backend


def make_continuing_backend(tokenizer_json: str) -> Backend:
    """Return the Backend that puts no space, and no mark for a space, before a text."""
    # json.loads calls without_prefix for each object, however deep in a sequence of components. It
    # turns off add_prefix_space, prepend_scheme and Prepend.
    content = json.loads(tokenizer_json, object_hook=without_prefix)
    return make_backend(json.dumps(content))


def encode_with(backend: Backend, text: str) -> np.ndarray:
    """Return the token ids of a text, uint32 (n,), without BOS."""
    # encode_batch_fast releases Python's interpreter lock for the threads of data/fineweb-edu.py;
    # encode does not
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, np.uint32)


def find_bos_ids(backend: Backend) -> tuple[int, ...]:
    """Return the ids that the post-processor of a tokenizer.json writes before a text.

    Several kinds of post-processors write such ids: encode a text to see them. The text needs at
    least one token, to tell the ids before it from the ids after it. For "Hello" LLaMA 2 gives the
    ids [1, 15043] and the sequence ids [None, 0], so that 1 is its BOS.
    """
    # try the probe, then the tokens themselves, until a text has a token
    for text in (PROBE, *backend.get_vocab()):
        encoding = backend.encode(text)  # includes what the post-processor adds
        if 0 in encoding.sequence_ids:  # 0: id of the text; None: id of the post-processor
            return tuple(encoding.ids[: encoding.sequence_ids.index(0)])
    return ()  # no text has a token


def without_prefix(component: dict) -> dict:
    """Return a component of a tokenizer.json (normalizer, pre-tokenizer, ...) that puts nothing
    before a text: the component itself, changed in place, or another one. An object_hook of
    json.loads, which calls it for {"type": "Metaspace", "add_prefix_space": True} and each other
    object of the file."""
    component_type = component.get("type")
    if component_type == "Prepend":  # Llama 2's normalizer
        # not `"prepend": ""`, with which the library fails on a text that begins with spaces
        return {"type": "Sequence", "normalizers": []}
    if component_type in ("ByteLevel", "Metaspace"):
        component["add_prefix_space"] = False
    if component_type == "Metaspace":
        # newer files have prepend_scheme instead of add_prefix_space
        component["prepend_scheme"] = "never"
    return component


def byte_characters() -> list[str]:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255.

    A printable character of Latin-1 stands for its own byte. The n-th character from U+0100 on
    stands for the n-th other byte (bytes_to_unicode in GPT-2's encoder.py).
    """
    characters: list[str] = []
    num_others = 0  # bytes so far that are not printable
    for byte in range(256):
        character = chr(byte)
        if character.isprintable() and character != " ":
            characters.append(character)
        else:
            characters.append(chr(0x100 + num_others))  # "Ġ", U+0120, for the space
            num_others += 1
    return characters


def keep_only_bos(backend: Backend) -> dict:
    """Change the post-processor of a backend, in place, to write only BOS before a text and no ids
    after it, because models here train without such ids. Return its tokenizer.json as a dict."""
    bos_ids = find_bos_ids(backend)  # (1,) of LLaMA 2, () of GPT-2
    bos_tokens = [backend.id_to_token(token_id) for token_id in bos_ids]  # ["<s>"]
    backend.post_processor = TemplateProcessing(
        single=[*bos_tokens, "$A"],  # BOS, then the text, which the library calls $A
        special_tokens=list(zip(bos_tokens, bos_ids, strict=True)),  # [("<s>", 1)]
    )
    return json.loads(backend.to_str())


def definition_checksum(content: dict) -> str:
    """Return the CRC-32, in hexadecimal, of all parts of a tokenizer.json that decide the ids of a
    text. It names a tokenizer, `tokenizer-<checksum>`, and recognizes files that hold the tokenizer
    gpt2 or bytes (CHECKSUMS). Files of one tokenizer may differ in other parts."""
    added_tokens: dict[str, dict] = {}  # entries by token: {"<|endoftext|>": {"id": 50256, ...}}
    for entry in content["added_tokens"]:  # {"id": 50256, "content": "<|endoftext|>", ...}
        # "normalized" has no effect without a normalizer
        is_normalized = entry["normalized"] and content["normalizer"] is not None
        added_tokens[entry["content"]] = entry | {"normalized": is_normalized}
    # drop options that are off (null, "", false or 0.0), because some files leave them out
    model_fields = {name: value for name, value in content["model"].items() if value}
    if isinstance(model_fields["vocab"], dict):  # a Unigram model has a list of pairs
        # drop added tokens, because only some files list them in the vocabulary, too
        vocab = sorted(model_fields["vocab"].items())  # [("!", 0), ...]: files differ in the order
        model_fields["vocab"] = [pair for pair in vocab if pair[0] not in added_tokens]
    # not "decoder": it does not change the ids of a text
    components = [content[name] for name in ("normalizer", "pre_tokenizer", "post_processor")]
    definition = json.dumps([added_tokens, model_fields, *components], sort_keys=True)
    return f"{zlib.crc32(definition.encode()):08x}"


def has_characters_alone(backend: Backend) -> bool:
    """Return True for a vocabulary of characters, like nanoGPT's, which has no end of text."""
    # with a pre-tokenizer, the characters may stand for bytes
    return backend.pre_tokenizer is None and max(map(len, backend.get_vocab())) == 1


def usual_ends(backend: Backend) -> Sequence[str]:
    """Return candidates for a tokenizer's end-of-text token, the best first. In a vocabulary of
    characters a line break separates documents; without a line break, any other character does."""
    if has_characters_alone(backend):
        return ("\n", *sorted(backend.get_vocab()))
    return ENDS_OF_TEXT


def find_end_of_text(path: Path, backend: Backend, candidates: Sequence[str | None]) -> str:
    """Return the first candidate that is a token of the backend; skip candidates that are None.
    Raise UserError, which names `path`, if no candidate is a token."""
    for token in candidates:
        if token is not None and backend.token_to_id(token) is not None:
            return token
    tried = ", ".join(filter(None, candidates))  # "<|endoftext|>, </s>, ..."
    raise UserError(
        f"{path} has no token that ends a text ({tried}): end_of_text of data/fineweb-edu.py names "
        "it"
    )


def make_spec(backend: Backend, end_of_text: str, model_tokens: ModelTokens) -> str:
    """Return the spec of a tokenizer, with a model's statements about its tokens. Raise an error
    for an unusable vocabulary or chat template."""
    content = keep_only_bos(backend)  # {"added_tokens": [...], "model": {...}, ...}
    spec_fields = {  # read by FileTokenizer
        "eot": end_of_text,
        "turn_end": end_of_text,  # provisional: replaced below if there is a chat template
        **asdict(model_tokens),  # template_tokens, chat_template, end_ids
        TOKENIZER_FILE: content,  # the key is "tokenizer.json"
    }
    # If the file defines the tokenizer gpt2 or bytes, the spec is only this name, so that shards,
    # checkpoints and models of other projects agree. With other ends of a text, or with a chat
    # template, the spec needs the file.
    name = CHECKSUMS.get(definition_checksum(content))  # "gpt2", "bytes" or None
    eot = backend.token_to_id(end_of_text)
    if name is not None and TOKENIZERS[name].eot == eot:
        if model_tokens.chat_template is None and set(model_tokens.end_ids) <= {eot}:
            return name
        spec_fields["name"] = name  # the same tokens: shards with this name fit the model
    tokenizer = FileTokenizer(spec_fields)
    if tokenizer.chat_template:  # not CHAT_TEMPLATE, whose answers end with end of text
        spec_fields["turn_end"] = tokenizer.find_turn_end()
    return json.dumps(spec_fields)


class PlainUnpickler(pickle.Unpickler):
    """Reads only dicts, texts and numbers of a pickle file. pickle itself would run its code."""

    def find_class(self, module: str, name: str) -> None:
        """Refuse objects that need an import; `reading` adds the name of the file to the error."""
        raise UserError(f"it holds a {module}.{name}, not only dicts, texts and numbers")


def character_backend(path: Path) -> Backend:
    """Return a tokenizers.Tokenizer with the characters and ids of nanoGPT's meta.pkl."""
    with open(path, "rb") as file:
        id_by_character = PlainUnpickler(file).load()["stoi"]  # {"\n": 0, " ": 1, "!": 2, ...}
    backend = Backend(BPE(id_by_character, []))  # BPE without merges: each character is a token
    backend.decoder = Fuse()  # for other programs: no spaces between tokens
    return backend


def read_tokenizer_spec(path: Path, end_of_text: str | None = None) -> str:
    """Return the spec of a tokenizer.json, or of nanoGPT's meta.pkl. Raise UserError if the file
    cannot be used, or lacks the token `end_of_text` or, if `end_of_text` is None, all of
    usual_ends."""
    # any error becomes a UserError that names the file
    with reading(path, "a tokenizer that can be used"):
        if path.suffix == ".pkl":
            backend = character_backend(path)  # a tokenizers.Tokenizer
        else:
            backend = make_backend(path.read_text(encoding="utf-8"))
    # the file was read without an error: an error here says "is not", not "is damaged or not"
    with reading(path, "a tokenizer that can be used", "is not"):
        # ("<|endoftext|>", "</s>", ...), or the one token that the caller asks for
        candidates = usual_ends(backend) if end_of_text is None else (end_of_text,)
        # ModelTokens(): no chat template, no end_ids; pretrained_tokenizer_spec reads a model's
        return make_spec(backend, find_end_of_text(path, backend, candidates), ModelTokens())


def named_spec_by_size(folder: Path, num_tokens: int) -> str:
    """Return "gpt2" or "bytes" for a model without tokenizer files, by the size of its vocabulary:
    some GPT-2 models come without them. Raise UserError, which names `folder`, for other sizes."""
    if num_tokens == 50_304:  # GPT-2's, padded for fast matmuls
        num_tokens = 50_257
    for name, tokenizer_class in TOKENIZERS.items():
        if tokenizer_class.vocab_size == num_tokens:
            return name
    raise UserError(
        f"{folder} has no {TOKENIZER_FILE} for its {num_tokens:,} tokens, which are neither "
        "GPT-2's (50,257, or 50,304 with padding) nor bytes (257): put it, or nanoGPT's "
        "meta.pkl, beside the weights"
    )


def pretrained_tokenizer_spec(folder: Path, declared_vocab_size: int) -> str:
    """Return the spec of the tokenizer of a Hugging Face model, or of a file with only weights.
    `declared_vocab_size` is what the model's own config says. Raise UserError if the tokenizer is
    missing or cannot be used."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return named_spec_by_size(folder, declared_vocab_size)
    path = folder / TOKENIZER_FILE
    with reading(folder, "a folder with a tokenizer that can be used", "is not"):
        probe_ids = None  # ids of a test text by the tokenizer.json itself; None without this file
        if path.is_file():
            backend = make_backend(path.read_text(encoding="utf-8"))  # a tokenizers.Tokenizer
            probe_ids = encode_with(backend, PROBE).tolist()  # compared with transformers' below
            # "gpt2" or "bytes" without the import of transformers, which takes seconds; else None
            known_name = CHECKSUMS.get(definition_checksum(keep_only_bos(backend)))
            if known_name and tokenizer_json_says_all(folder, TOKENIZERS[known_name].eot):
                return known_name
        # What transformers reads. tokenizer_json: a str, without added tokens from the id
        # declared_vocab_size on. model_tokens: chat template, special tokens such as eos_token, and
        # each eos_token_id of the other files.
        tokenizer_json, model_tokens = read_folder(folder, declared_vocab_size)
        backend = make_backend(tokenizer_json)
        # some classes of transformers replace the pre-tokenizer or the normalizer of the file
        if probe_ids not in (None, encode_with(backend, PROBE).tolist()):
            warning = f"warning: transformers gives a text other ids than {path}"
            logging.getLogger("notes").warning(warning)  # to stderr, on the main process only
        # the model's own end of text first; None if its files name none
        candidates = (model_tokens.template_tokens.get("eos_token"), *usual_ends(backend))
        spec = make_spec(backend, find_end_of_text(folder, backend, candidates), model_tokens)
        if spec not in TOKENIZERS:  # GPT-2's and bytes lose nothing
            check_round_trip(FileTokenizer(json.loads(spec)))  # ValueError if it loses characters
        return spec


def check_round_trip(tokenizer: FileTokenizer) -> None:
    """Raise ValueError if encoding and decoding does not restore words of the vocabulary with
    spaces between them, as with tokens that have marks within words."""
    # bytes_of_id: {0: b"!", ...}, whose keys a vocabulary may list in any order
    ids = sorted(tokenizer.bytes_of_id)
    # ["!", ..., " the", ...]
    tokens = [tokenizer.bytes_of_id[token_id].decode(errors="replace") for token_id in ids]
    words = [token.strip() for token in tokens if token.strip().isalpha()]
    text = " ".join(words[:100])
    lost_text = tokenizer.lost_text(text, tokenizer.encode(text))
    if lost_text:
        raise ValueError(f"it loses characters of a text, such as {lost_text[:20]!r}")
