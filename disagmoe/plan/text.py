"""Programs as text: a lossless form per stream, and the usual stage projection.

Lossless (read and written): a header, then one line per stream in execution
order. A token is kind letter, layer, phase, micro-batch, then where they apply
`.chunk` (if not 0), `~replica` (if not 0), `>peer` or `<peer` (a send, a receive)
and `&pair`; `-` stands for -1.

    program workers=2 layers=1 microbatches=1 chunks=2
    w0 COMPUTE: E-F0 A0F0 A0B0 E-B0
    w0 SEND: D0F0>1 D0F0.1>1

At the end of its header a Program with bounds on what is in flight has `in_flight=4,3`
(one number per worker), and one that gathers parameters early `early_gather`.

The stage projection (written only) is what pipeline papers and
torch.distributed.pipelining print: `0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from disagmoe.ops import COMPUTE_STREAMS, KIND_LETTER, RECV_STREAMS, SEND_STREAMS, Kind, Op, Phase, Stream
from disagmoe.plan.program import Program, Row

_KIND_OF = {letter: kind for kind, letter in KIND_LETTER.items()}
_NUMBER = r"(-|\d+)"
_TOKEN = re.compile(
    rf"([{''.join(_KIND_OF)}]){_NUMBER}([{''.join(p.name for p in Phase)}]){_NUMBER}"
    rf"(?:\.{_NUMBER})?(?:~{_NUMBER})?(?:([<>]){_NUMBER})?(?:&{_NUMBER})?"
)
_HEADER = re.compile(
    r"program workers=(\d+) layers=(\d+) microbatches=(\d+) chunks=(\d+)(?: in_flight=(\d+(?:,\d+)*))?( early_gather)?"
)
_LINE = re.compile(r"w(\d+) (\w+):(.*)")


def op_token(op: Op) -> str:
    """One operation without its place, e.g. `A3F0` or `D3F0.1`."""
    token = f"{KIND_LETTER[op.kind]}{_number(op.layer)}{op.phase.name}{_number(op.microbatch)}"
    if op.chunk:
        token += f".{_number(op.chunk)}"
    if op.replica:
        token += f"~{_number(op.replica)}"
    return token


def row_token(program: Program, row: int) -> str:
    """One row with its place, for messages: `A3F0@w1`, a transfer `D3F0 w1>w5`."""
    token, worker, peer = op_token(program.op(row)), int(program.worker[row]), int(program.peer[row])
    stream = int(program.stream[row])
    if stream in SEND_STREAMS:
        return f"{token} w{worker}>w{peer}"
    if stream in RECV_STREAMS:
        return f"{token} w{peer}>w{worker}"
    return f"{token}@w{worker}"


def to_text(program: Program) -> str:
    """The lossless form; `from_text` returns an equal Program."""
    lines: dict[tuple[int, Stream], list[str]] = {}
    for row in program.rows():
        token = op_token(row.op)
        if row.peer != -1:
            token += ("<" if row.stream in RECV_STREAMS else ">") + _number(row.peer)
        if row.pair != -1:
            token += f"&{_number(row.pair)}"
        lines.setdefault((row.worker, row.stream), []).append(token)
    header = (
        f"program workers={program.n_workers} layers={program.n_layers}"
        f" microbatches={program.n_microbatches} chunks={program.n_chunks}"
    )
    if program.in_flight:
        header += f" in_flight={','.join(str(limit) for limit in program.in_flight)}"
    header += " early_gather" * program.early_gather
    body = [f"w{worker} {stream.name}: {' '.join(tokens)}" for (worker, stream), tokens in sorted(lines.items())]
    return "\n".join([header, *body]) + "\n"


def from_text(text: str) -> Program:
    """Read the lossless form. Blank lines and lines starting with # are skipped.

    Raises ValueError naming the line and the token that cannot be read.
    """
    numbered = [(i, line.strip()) for i, line in enumerate(text.splitlines(), start=1)]
    content = [(i, line) for i, line in numbered if line and not line.startswith("#")]
    if not content or not (header := _HEADER.fullmatch(content[0][1])):
        raise ValueError("program text must start with 'program workers=<n> layers=<n> microbatches=<n> chunks=<n>'")
    n_workers, n_layers, n_microbatches, n_chunks = (int(x) for x in header.groups()[:4])
    in_flight = tuple(int(x) for x in header[5].split(",")) if header[5] else ()
    rows: list[Row] = []
    for number, line in content[1:]:
        match = _LINE.fullmatch(line)
        if not match or match[2] not in Stream.__members__:
            streams = ", ".join(Stream.__members__)
            raise ValueError(
                f"line {number}: {line[:40]!r} is not 'w<worker> <stream>: <operations>' on one of {streams}"
            )
        worker, stream = int(match[1]), Stream[match[2]]
        rows += [_row(worker, stream, token, number) for token in match[3].split()]
    return Program.from_rows(
        rows,
        n_workers=n_workers,
        n_layers=n_layers,
        n_microbatches=n_microbatches,
        n_chunks=n_chunks,
        in_flight=in_flight,
        early_gather=header[6] is not None,
    )


def stage_text(program: Program, stages: Sequence[int] | None = None) -> str:
    """The stage projection, one line per compute stream: `w0: 0F0 1F0 0B0`.

    In a stage-level Program a stage is its layer. For a layer-level Program
    `stages[layer]` is the virtual stage of a layer; a stage is printed where its
    first operation runs, and embedding, head and optimizer are left out. Rows of
    one pair are printed together; the second compute stream has a line of its
    own, `w0 COMPUTE_B: ...`.
    """
    if stages is not None and len(stages) != program.n_layers:
        raise ValueError(
            f"stages has {len(stages)} entries for {program.n_layers} layers: one stage per layer is needed"
        )
    lines = []
    for worker in range(program.n_workers):
        for stream in sorted(COMPUTE_STREAMS):
            rows = program.stream_rows(worker, stream)
            if tokens := _stage_tokens(program, [int(r) for r in rows], stages):
                name = f"w{worker}" if stream == Stream.COMPUTE else f"w{worker} {stream.name}"
                lines.append(f"{name}: {' '.join(tokens)}")
    return "\n".join(lines) + "\n"


def _stage_tokens(program: Program, rows: Sequence[int], stages: Sequence[int] | None) -> list[str]:
    """Tokens of one stream: each stage, phase and micro-batch once, pairs in parentheses."""
    parts: dict[tuple[str, ...] | int, dict[str, None]] = {}  # pair number or own token -> stage tokens, both in order
    seen: set[str] = set()
    for row in rows:
        op, pair = program.op(row), int(program.pair[row])
        if op.kind not in ((Kind.STAGE,) if stages is None else (Kind.ATTN, Kind.FFN)):
            continue
        stage = op.layer if stages is None else stages[op.layer]
        # Layer by layer a pair's backward is in two parts, as a unit it is one.
        parted = stages is not None and pair != -1 and op.phase in (Phase.I, Phase.W)
        token = f"{stage}{'B' if parted else op.phase.name}{op.microbatch}"
        if token in seen:
            continue
        seen.add(token)
        parts.setdefault((token,) if pair == -1 else pair, {})[token] = None
    return [_overlapped(list(tokens)) for tokens in parts.values()]


def _overlapped(tokens: list[str]) -> str:
    """A pair in the notation of torch.distributed.pipelining, forward first."""
    if len(tokens) == 1:
        return tokens[0]
    ordered = sorted(tokens, key=lambda t: Phase.F.name not in t)
    return f"({';'.join(ordered)})OVERLAP_F_B"


def _number(value: int) -> str:
    if value < -1:
        raise ValueError(f"{value} has no text form: columns of a program are -1 (does not apply) or more")
    return "-" if value == -1 else str(value)


def _row(worker: int, stream: Stream, token: str, line: int) -> Row:
    """Parse one token; the arrow must suit the stream."""
    match = _TOKEN.fullmatch(token)
    if not match:
        raise ValueError(f"line {line}: {token!r} is not an operation; expected e.g. A3F0, D3F0.1>2 or S0B1&4")
    kind, layer, phase, microbatch, chunk, replica, arrow, peer, pair = match.groups()
    wanted = "<" if stream in RECV_STREAMS else ">"
    if arrow and arrow != wanted:
        raise ValueError(f"line {line}: {token!r} on stream {stream.name} must write its peer as {wanted}")
    op = Op(_KIND_OF[kind], Phase[phase], _value(layer), _value(microbatch), _value(chunk, 0), _value(replica, 0))
    return Row(worker, stream, op, _value(peer, -1), _value(pair, -1))


def _value(text: str | None, default: int = -1) -> int:
    if text is None:
        return default
    return -1 if text == "-" else int(text)
