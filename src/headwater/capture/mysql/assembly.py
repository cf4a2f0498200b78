"""From events of the binary log to the items of the contract: whole transactions in bounded parts,
schema changes before the rows that have them, and positions between transactions.

It reads no socket and no clock. The only thing that it asks for is the catalog, after DDL. The
rows' columns are always those of their table map, because the catalog may be ahead of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from headwater import limits
from headwater.capture.mysql.bindings import Binding, bind
from headwater.capture.mysql.describe import (
    Charsets,
    Table,
    described_by,
    has_fewer,
    has_key,
    same_columns,
    with_gaps,
)
from headwater.capture.mysql.positions import (
    GtidSet,
    Position,
    mariadb_gtids,
    print_mariadb_gtids,
)
from headwater.capture.mysql.statements import Effect, effects
from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire.events import Gtid, Header, TableMap
from headwater.capture.mysql.wire.table_map import read_table_map
from headwater.capture.source import (
    Item,
    Progress,
    RowChanges,
    RowOp,
    SchemaChange,
    SourceRow,
    TableDropped,
    TransactionPart,
)
from headwater.errors import PositionLost, SourceRefused

_RESNAPSHOT = "Copy the tables again: headwater source resnapshot NAME"


class Catalog(msgspec.Struct, frozen=True):
    """The captured tables by schema and name, and the names of those that do not exist now."""

    tables: dict[tuple[str, str], Table]
    absent: frozenset[tuple[str, str]]
    charsets: Charsets
    fold: bool


class _Stale:
    """A table whose DDL was read, but not announced. `shape`: announce it even if the columns are
    as before. `rows`: copy it."""

    def __init__(self) -> None:
        self.shape = self.rows = False


class _Group:
    """Consecutive changes of one table with one operation."""

    def __init__(self, table: str, op: RowOp) -> None:
        self.table, self.op = table, op
        self.after, self.before = list[SourceRow](), list[SourceRow]()

    def changes(self) -> RowChanges:
        return RowChanges(self.table, self.op, self.after, self.before)


class Assembler:
    """Takes the events in their order. `items` collects what they amount to; the caller takes them
    out. `weight` is the number of rows in them, `bytes` about their size."""

    def __init__(
        self,
        after: Position,
        catalog: Catalog,
        look: Callable[[], Catalog],
        *,
        by_gtid: bool,
        named_columns: bool = True,
    ) -> None:
        self.items = list[Item]()
        self.weight = self.bytes = 0
        self.in_transaction = False
        self.reached: Position | None = None
        self._given: Position | None = None
        self._look = look
        self._mariadb = after.dialect == "mariadb"
        self._server, self._dialect = after.server, after.dialect
        self._file, self._end = after.file, after.offset
        self._mariadb_gtids = mariadb_gtids(after.gtids) if self._mariadb else {}
        self._mysql_gtids = GtidSet.parse("" if self._mariadb else after.gtids)
        self._has_gtids = bool(after.gtids) or self._mariadb
        self._skipping, self._named_columns = by_gtid, named_columns
        self._gtid: Gtid | None = None
        self._charsets, self._fold = catalog.charsets, catalog.fold
        self._tables, self._absent = dict(catalog.tables), set(catalog.absent)
        self._stale = dict[tuple[str, str], _Stale]()
        self._owed = set[tuple[str, str]]()
        self._bindings = dict[bytes, Binding | None]()
        self._by_id = dict[int, Binding | None]()
        self._groups, self._rows, self._size, self._parts = list[_Group](), 0, 0, 0
        self._savepoints = dict[str, tuple[int, int, int, int, int]]()

    # ------------------------------------------------------------------ events

    def feed(self, header: Header, body: bytes) -> None:
        if header.end:
            self._advance(header.end)
        type = events.COMPRESSED_ROWS.get(header.type, header.type)
        if type in events.ROWS:
            self._row_event(type, header.type, body)
        elif type == events.TABLE_MAP:
            self._table_map(body)
        elif type == events.XID:
            self._commit(header.timestamp)
        elif type == events.MARIADB_GTID:
            self._begin(events.read_mariadb_gtid(body, header.server_id))
        elif type in (events.GTID, events.ANONYMOUS_GTID):
            self._begin(events.read_mysql_gtid(body) if type == events.GTID else None)
        elif type in (events.QUERY, events.QUERY_COMPRESSED, events.LOAD_QUERY):
            self._query(header, body)
        else:
            self._other(header, body)

    def _other(self, header: Header, body: bytes) -> None:
        match header.type:
            case events.ROTATE:
                self._rotate(header, *events.read_rotate(body))
            case events.FORMAT:
                self._by_id.clear()
            case events.HEARTBEAT:
                self._heartbeat(header, body)
            case events.PAYLOAD:
                for event in events.read_payload(body):
                    inner = Header(*events.HEADER.unpack_from(event))
                    self.feed(inner._replace(end=0), event[events.HEADER_SIZE :])
            case events.XA_PREPARE:
                self._xa(header, body)
            case events.INCIDENT:
                raise PositionLost("the server reports that events are missing", hint=_RESNAPSHOT)
            case events.PARTIAL_UPDATE:
                self._refuse_partial(body)
            case events.TAGGED_GTID:
                raise SourceRefused(
                    "the binary log has GTIDs with tags, which cannot be read",
                    hint="Do not set gtid_next to a GTID with a tag.",
                )
            case _:
                pass

    def _advance(self, end: int) -> None:
        """Events have the low 32 bits of their end; a file may be larger."""
        whole = (self._end & ~0xFFFFFFFF) | end
        self._end = whole if whole >= self._end else whole + (1 << 32)

    def _rotate(self, header: Header, file: str, offset: int) -> None:
        self._by_id.clear()
        changed = file != self._file
        self._file, self._end = file, offset
        if changed and header.end and not self.in_transaction:
            self._reach()

    def _heartbeat(self, header: Header, body: bytes) -> None:
        """The server has nothing to send. While it passes over what we have by GTID, the offset is
        before our position."""
        if self.in_transaction or self._skipping or self._gtid is not None:
            return
        file = events.text(body)
        if file != self._file:
            self._file, self._end = file, header.end
        self._reach()

    # ------------------------------------------------------------------ transactions

    def _begin(self, gtid: Gtid | None) -> None:
        self._skipping = False
        self._gtid = gtid
        self.in_transaction = gtid is not None and self._mariadb and not gtid.alone
        self._savepoints.clear()

    def _reach(self) -> None:
        self.reached = self._position()

    def _position(self) -> Position:
        gtids = ""
        if self._has_gtids:
            gtids = (
                print_mariadb_gtids(self._mariadb_gtids)
                if self._mariadb
                else str(self._mysql_gtids)
            )
        return Position(self._dialect, self._server, self._file, self._end, gtids)

    def _end_transaction(self) -> None:
        if (gtid := self._gtid) is not None:
            if self._mariadb:
                domain, server = gtid.server.split("-")
                self._mariadb_gtids[int(domain)] = int(server), gtid.number
            else:
                self._has_gtids = True
                self._mysql_gtids.add(gtid.server, gtid.number)
        self._gtid, self.in_transaction = None, False
        self._reach()

    def _commit(self, timestamp: int) -> None:
        committed_at = self._gtid.committed_at if self._gtid else None
        self._end_transaction()
        if not self._groups and not self._parts:
            return
        self._announce_stale(keep_parts=True)
        if committed_at is None and timestamp:
            committed_at = datetime.fromtimestamp(timestamp, UTC)
        self._part(str(self.reached), committed_at)
        self._given, self.reached, self._parts = self.reached, None, 0

    def _part(self, position: str | None = None, committed_at: datetime | None = None) -> None:
        changes = [group.changes() for group in self._groups]
        self.items.append(TransactionPart(changes, position, committed_at))
        self.weight += self._rows
        self.bytes += self._size
        self._groups, self._rows, self._size = [], 0, 0
        self._parts += 1

    def progress(self) -> None:
        """Add the position that was reached without changes, if there is one."""
        if self.reached is None or self.in_transaction:
            return
        self._announce_stale()
        if self.reached != self._given:
            self.items.append(Progress(str(self.reached)))
        self._given, self.reached = self.reached, None

    def _roll_back(self) -> None:
        """The log has it only where a table without transactions was written as well."""
        if self._parts:
            raise SourceRefused(
                "a transaction larger than a part was rolled back in the binary log",
                hint=_RESNAPSHOT,
            )
        self._groups, self._rows, self._size = [], 0, 0
        self._end_transaction()

    def _xa(self, header: Header, body: bytes) -> None:
        if events.is_one_phase(body):
            self._commit(header.timestamp)
        elif self._groups or self._parts:
            raise SourceRefused(
                "a captured table was written by an XA transaction in two phases",
                hint=f"Such a transaction cannot be captured. {_RESNAPSHOT}",
            )
        else:
            self._end_transaction()

    # ------------------------------------------------------------------ rows

    def _table_map(self, body: bytes) -> None:
        number, layout = int.from_bytes(body[:6], "little"), body[6:]
        binding = self._bindings.get(layout)
        if layout not in self._bindings or (
            binding is not None and self._known(binding.table) is not binding.table
        ):
            binding = self._bind(body)
            self._bindings[layout] = binding
        self._by_id[number] = binding

    def _key(self, schema: str, table: str) -> tuple[str, str]:
        return (schema.lower(), table.lower()) if self._fold else (schema, table)

    def _known(self, table: Table) -> Table | None:
        return self._tables.get(self._key(table.schema, table.name))

    def _bind(self, body: bytes) -> Binding | None:
        table_map = read_table_map(body, mariadb=self._mariadb)
        known = self._tables.get(self._key(table_map.schema, table_map.table))
        if known is None:
            return None
        table = self._described(table_map, known)
        return bind(table_map, table, self._charsets)

    def _described(self, table_map: TableMap, known: Table) -> Table:
        """The table as its rows are from here on; announced where it changed."""
        key = self._key(known.schema, known.name)
        stale = self._stale.pop(key, None)
        table = described_by(table_map, known, self._charsets)
        if stale is None and same_columns(table, known):
            return known
        present = self._look().tables.get(key)
        if present is not None:
            table = described_by(table_map, present, self._charsets)
        fewer = has_fewer(table, known)
        if table.source != known.source or (stale is not None and stale.shape):
            self._announce(table, present, copies=(stale or _Stale()).rows or not fewer)
        else:
            self._tables[key] = table
        return self._tables[key]

    def _row_event(self, type: int, sent_as: int, body: bytes) -> None:
        binding = self._by_id.get(int.from_bytes(body[:6], "little"))
        if binding is None:
            return
        op: RowOp = events.ROWS[type]  # type: ignore[assignment]
        after, before, size = binding.read(type, op, body, inflate=type != sent_as)
        self._add(binding, op, after, before, size)

    def _add(
        self,
        binding: Binding,
        op: RowOp,
        after: list[SourceRow],
        before: list[SourceRow],
        size: int,
    ) -> None:
        count = len(after) or len(before)
        step = max(1, min(count, limits.SOURCE_PART_CHANGES))
        if size > limits.SOURCE_PART_BYTES:
            step = max(1, min(step, count * limits.SOURCE_PART_BYTES // size))
        for start in range(0, count, step):
            end = min(start + step, count)
            share = size * (end - start) // count
            if self._groups and (
                self._rows + end - start > limits.SOURCE_PART_CHANGES
                or self._size + share > limits.SOURCE_PART_BYTES
            ):
                self._part()
            group = self._group(binding.table.source.name, op)
            group.after += after[start:end]
            group.before += before[start:end]
            self._rows += end - start
            self._size += share

    def _group(self, table: str, op: RowOp) -> _Group:
        last = self._groups[-1] if self._groups else None
        if last is None or last.table != table or last.op != op:
            last = _Group(table, op)
            self._groups.append(last)
        return last

    def _refuse_partial(self, body: bytes) -> None:
        if self._by_id.get(int.from_bytes(body[:6], "little")) is not None:
            raise SourceRefused(
                "a captured table was written with partial JSON",
                hint=f"set global binlog_row_value_options = ''. {_RESNAPSHOT}",
            )

    # ------------------------------------------------------------------ statements

    def _query(self, header: Header, body: bytes) -> None:
        if header.type == events.LOAD_QUERY:
            body = body[:13] + body[26:]
        query = events.read_query(body, compressed=header.type == events.QUERY_COMPRESSED)
        word = query.statement[:12].upper().split(" ")[0].rstrip(";")
        if word == "BEGIN":
            self.in_transaction, self._skipping = True, False
        elif word == "COMMIT":
            self._commit(header.timestamp)
        elif word in ("SAVEPOINT", "ROLLBACK"):
            self._savepoint(query.statement)
        elif word == "XA":
            self.in_transaction = query.statement[:8].upper().startswith("XA START")
            if not self.in_transaction and not self._groups:
                self._end_transaction()
        else:
            self._effects(effects(query.schema, query.statement), header)
            if not self.in_transaction:
                self._commit(header.timestamp)

    def _savepoint(self, statement: str) -> None:
        words = statement.split()
        if words[0].upper() == "SAVEPOINT":
            last = len(self._groups[-1].after or self._groups[-1].before) if self._groups else 0
            mark = (self._parts, len(self._groups), last, self._rows, self._size)
            self._savepoints[words[-1]] = mark
        elif len(words) == 1 or words[1].upper() == "WORK":
            self._roll_back()
        else:
            self._roll_back_to(words[-1])

    def _roll_back_to(self, name: str) -> None:
        parts, groups, last, rows, size = self._savepoints.get(name, (0, 0, 0, 0, 0))
        if parts != self._parts:
            raise SourceRefused(
                "a transaction larger than a part was rolled back to a savepoint",
                hint=_RESNAPSHOT,
            )
        del self._groups[groups:]
        if self._groups:
            del self._groups[-1].after[last:], self._groups[-1].before[last:]
        self._rows, self._size = rows, size

    def _effects(self, found: list[Effect], header: Header) -> None:
        """What a statement did to captured tables. A table that it dropped and made again, as tools
        for online schema changes do, is only changed."""
        made = {self._key(e.schema, e.table) for e in found if e.act == "create"}
        for effect in found:
            for key in self._touched(effect):
                if effect.act == "write":
                    raise PositionLost(
                        f"{'.'.join(key)} was written by a statement that is logged as text",
                        hint=f"Set binlog_format=ROW in every session. {_RESNAPSHOT}",
                    )
                if effect.act == "truncate":
                    self._group(self._tables[key].source.name, "truncate")
                    self._rows += 1
                elif effect.act in ("drop", "drop_schema"):
                    if key not in made:
                        self._dropped(key)
                else:
                    self._changed(key, effect)

    def _touched(self, effect: Effect) -> list[tuple[str, str]]:
        if effect.act == "write":
            names = {name.lower() for name in effect.names} if self._fold else effect.names
            return [
                key
                for key in self._tables
                if key[1] in names
                and (self._key(effect.schema, "")[0] == key[0] or key[0] in names)
            ]
        if effect.act == "drop_schema":
            schema = self._key(effect.schema, "")[0]
            return [key for key in self._tables if key[0] == schema]
        key = self._key(effect.schema, effect.table)
        if key in self._tables or (effect.act == "create" and key in self._absent):
            return [key]
        return []

    def _dropped(self, key: tuple[str, str]) -> None:
        self._bindings.clear()
        table = self._tables.pop(key)
        self._stale.pop(key, None)
        self._absent.add(key)
        self._flush_before_schema()
        self.items.append(TableDropped(table.source.name))

    def _changed(self, key: tuple[str, str], effect: Effect) -> None:
        """The catalog may be ahead of the log, so the next table map says what has changed. Before
        a position after the DDL is given away, the catalog has to."""
        self._bindings.clear()
        if key in self._tables:
            stale = self._stale.setdefault(key, _Stale())
            stale.shape, stale.rows = stale.shape or effect.shape, stale.rows or effect.rows
            if not self._named_columns:
                self._announce_stale()
            return
        present = self._look().tables.get(key)
        if present is not None:  # Otherwise the event that dropped it again follows.
            self._absent.discard(key)
            self._announce(present, present, copies=True)

    def _announce_stale(self, *, keep_parts: bool = False) -> None:
        if not self._stale:
            return
        catalog = self._look()
        for key, stale in self._stale.items():
            present, known = catalog.tables.get(key), self._tables[key]
            if present is None:
                continue
            if stale.shape or present.source != known.source:
                fewer = has_fewer(present, known)
                copies = stale.rows or not fewer
                self._announce(present, present, copies=copies, keep_parts=keep_parts)
        self._stale.clear()

    def _announce(
        self, table: Table, present: Table | None, *, copies: bool, keep_parts: bool = False
    ) -> None:
        """A copy that is not possible, because the table has gone or has another key by now, is
        owed: the DDL that follows in the log has it made."""
        key = self._key(table.schema, table.name)
        table = with_gaps(table, present)
        self._tables[key] = table
        copies = copies or key in self._owed
        possible = present is not None and has_key(table, present)
        if copies and not possible:
            self._owed.add(key)
        else:
            self._owed.discard(key)
        if not keep_parts:
            self._flush_before_schema()
        self.items.append(SchemaChange(table.source, copies and possible))

    def _flush_before_schema(self) -> None:
        if self._groups:
            self._part()
