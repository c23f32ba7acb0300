"""Makes the data of a run: a WordPiece tokenizer that is trained on the text at hand, and the text as token ids.

`python -m examples.albert.tokenize_text` takes the text that every installation has: Python's manual (what
`help("topics")` shows) and the docstrings of the standard library and of torch. `--text FILE...` takes your own.

The folder `--output` gets two files:

- `tokenizer.json`, of the `tokenizers` library; the peers of a run compare its hash;
- `tokens.safetensors`: `train` and `held_out`, whole numbers of the shape [pairs, 2, tokens]. The two segments of a
  pair follow each other in their document. No document is in both parts.

The library does not train the same tokenizer twice, so do this once, and copy the folder to all machines of a run.
"""

import argparse
import ast
import hashlib
import sysconfig
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
HELD_OUT_ONE_IN = 16


def text_at_hand():
    """The documents that are there without a download, by name."""
    from pydoc_data.topics import topics

    documents = {f"topic {name}": topics[name] for name in sorted(topics)}
    library, torch_folder = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    sources = {path: library for path in library.rglob("*.py") if not {"site-packages", "test"} & set(path.parts)}
    sources |= dict.fromkeys(torch_folder.rglob("*.py"), torch_folder)
    for path, folder in sorted(sources.items()):
        if text := "\n\n".join(filter(None, docstrings(parsed(path)))):
            documents[f"{folder.name}/{path.relative_to(folder)}"] = text
    return documents


def parsed(path):
    """A file of Python as a tree; an empty one if Python itself cannot read it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in other people's files
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def docstrings(node):
    """The docstrings of a module, class or function and of those in it, in order."""
    yield ast.get_docstring(node)
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(inner)


def without_copies(documents):
    """The documents without the paragraphs that stood in one before: docstrings are copied a lot."""
    seen = set()
    for name, text in documents.items():
        kept = []
        for paragraph in text.split("\n\n"):
            if (words := " ".join(paragraph.split())) not in seen:
                seen.add(words)
                kept.append(words)
        yield name, "\n".join(kept)


def is_held_out(name):
    """Whether nobody trains on this document: decided by its name, so equal everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts, vocabulary):
    """A WordPiece tokenizer of lower-case words, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pairs_of(tokenizer, texts, length):
    """Pairs of segments that follow each other, each of `length` tokens: a tensor [pairs, 2, length]."""
    pairs = [torch.empty(0, 2, length, dtype=torch.int32)]
    for encoded in tokenizer.encode_batch(list(texts)):
        tokens = torch.tensor(encoded.ids, dtype=torch.int32)
        pairs.append(tokens[: len(tokens) // (2 * length) * 2 * length].view(-1, 2, length))
    return torch.cat(pairs)


def main():
    """Write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=Path("albert-data"), help="folder (default albert-data)")
    parser.add_argument("--text", type=Path, nargs="+", help="files of text, each one document")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the tokenizer (default 4096)")
    parser.add_argument("--length", type=int, default=64, help="tokens of an example, odd ends cut (default 64)")
    args = parser.parse_args()
    given = {path.name: path.read_text(encoding="utf-8") for path in args.text} if args.text else text_at_hand()
    documents = dict(without_copies(given))
    train = [text for name, text in documents.items() if not is_held_out(name)]
    held_out = [text for name, text in documents.items() if is_held_out(name)]
    tokenizer = train_tokenizer(train, args.vocabulary)
    segment = (args.length - 3) // 2  # beside [CLS] and two [SEP]
    tokens = {"train": pairs_of(tokenizer, train, segment), "held_out": pairs_of(tokenizer, held_out, segment)}
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.output / "tokenizer.json"))
    save_file(tokens, args.output / "tokens.safetensors")
    for part, texts in (("train", train), ("held_out", held_out)):
        size = sum(map(len, texts)) / 1e6
        print(f"{part}: {len(texts)} documents, {size:.1f} MB, {len(tokens[part])} pairs of 2 x {segment} tokens")
    print(f"{tokenizer.get_vocab_size()} tokens in the vocabulary")


if __name__ == "__main__":
    main()
