import { useMutation } from "headwater/react";

import { boardOf, REGIONS, withOrder } from "./orders.js";

let drafts = 0;

/** Boards show the order at once. If the server refuses it, they take it back. */
function showOrder(local, { item, region, amount }) {
  const order = { id: `draft ${++drafts}`, item, region, amount, status: "new" };
  for (const board of [boardOf(), boardOf(region)]) {
    local.live(board, (rows) => withOrder(rows, order));
  }
}

export function PlaceOrder({ region }) {
  const [place, { error }] = useMutation("place_order", { optimistic: showOrder });
  const submit = (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    const { item, region, amount } = Object.fromEntries(new FormData(form));
    place({ item, region, amount: Number(amount) });
    form.reset();
    form.elements[0].focus();
  };
  return (
    <form onSubmit={submit}>
      <input name="item" placeholder="Item" aria-label="Item" autoComplete="off" />
      <select name="region" defaultValue={region} aria-label="Region">
        {REGIONS.map((name) => (
          <option key={name}>{name}</option>
        ))}
      </select>
      <input name="amount" type="number" placeholder="Amount" aria-label="Amount" step="1" />
      <button>Place order</button>
      {error && <p role="alert">{error.message}</p>}
    </form>
  );
}
