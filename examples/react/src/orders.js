export const REGIONS = ["North", "East", "South", "West"];

/** What is done with an order next, and what it is then. */
export const NEXT = {
  new: { action: "Pack", status: "packed" },
  packed: { action: "Send", status: "sent" },
};

const SHOWN = 20;

/** The live query behind a board: the largest orders, of a region or of all. */
export const boardOf = (region) => ({
  table: "orders",
  where: region ? [["region", "=", region]] : [],
  order: [["amount", "desc"]],
  limit: SHOWN,
});

/** A board's rows with another at its place, as the server will have it. */
export const withOrder = (rows, order) =>
  [...rows, order].sort((a, b) => b.amount - a.amount).slice(0, SHOWN);
