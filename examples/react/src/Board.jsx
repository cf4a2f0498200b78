import { memo, useRef } from "react";
import { useLiveQuery, useMutation } from "headwater/react";

import { boardOf, NEXT } from "./orders.js";

/** A live query: rows enter, move and leave as the table changes, from any client. */
export function Board({ region }) {
  const { rows, status, error } = useLiveQuery(boardOf(region), { keep: true });
  if (status === "failed") return <p role="alert">{error.message}</p>;
  if (!rows) return <p className="empty">Loading …</p>;
  if (!rows.length) return <p className="empty">No orders yet.</p>;
  return (
    <table className={status}>
      <thead>
        <tr>
          <th className="number">#</th>
          <th>Item</th>
          <th>Region</th>
          <th className="number">Amount</th>
          <th>Status</th>
          <th className="number renders">Rendered</th>
          <th />
        </tr>
      </thead>
      <tbody>
        {rows.map((order) => (
          <Order key={order.id} order={order} />
        ))}
      </tbody>
    </table>
  );
}

/** Orders that have not changed are the same objects as before, and `memo` leaves them alone. */
const Order = memo(function Order({ order }) {
  const { id, item, region, amount, status } = order;
  const renders = useRef(0);
  renders.current += 1;
  return (
    <tr data-id={id}>
      <td className="number">{isPlaced(order) ? id : "…"}</td>
      <td className="item">{item}</td>
      <td>{region}</td>
      <td className="number">{amount.toLocaleString("en")}</td>
      <td>
        <span className={`status ${status}`}>{status}</span>
      </td>
      <td className="number renders">{renders.current}</td>
      <td className="actions">{isPlaced(order) && <Actions order={order} />}</td>
    </tr>
  );
});

/** One that the server does not know yet has no number. */
const isPlaced = ({ id }) => typeof id === "number";

function Actions({ order: { id, status } }) {
  const [advance, { error }] = useMutation("advance_order", {
    optimistic: (local, { id, status }) =>
      local.table("orders", (rows) =>
        rows.map((row) => (row.id === id ? { ...row, status } : row)),
      ),
  });
  const [remove] = useMutation("remove_order", {
    optimistic: (local, { id }) =>
      local.table("orders", (rows) => rows.filter((row) => row.id !== id)),
  });
  const next = NEXT[status];
  return (
    <>
      {error && <span role="alert">{error.message}</span>}
      {next && (
        <button onClick={() => advance({ id, status: next.status })}>{next.action}</button>
      )}
      <button aria-label={`Remove order ${id}`} onClick={() => remove({ id })}>
        ✕
      </button>
    </>
  );
}
