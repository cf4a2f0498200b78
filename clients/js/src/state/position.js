/**
 * A position in the change log: a database snapshot, and the log it belongs to. It contains the
 * transactions that were visible in its snapshot: those below `xmin`, and those below `xmax` that are
 * not in `xip`. To programs it is a text; only the client parses it. The part after a `~` is for the
 * gateway, which recognises by it the database history that a position belongs to.
 *
 * @typedef {{log: string, xmin: number, xmax: number, xip: number[]}} Position
 */

const POSITION = new RegExp(
  "^([0-9a-f]{1,16})-([0-9]{1,20}):([0-9]{1,20}):((?:[0-9]{1,20}(?:,[0-9]{1,20})*)?)" +
    "(?:~[0-9a-f.,]+)?$",
);

/** Parse a position. Throws RangeError. @param {string} text @returns {Position} */
export function parsePosition(text) {
  const found = POSITION.exec(text);
  if (!found) throw new RangeError(`'${text}' is not a position: expected LOG-XMIN:XMAX:XIP,…`);
  const [, log, xmin, xmax, xip] = found;
  return {
    log,
    xmin: Number(xmin),
    xmax: Number(xmax),
    xip: xip ? xip.split(",").map(Number) : [],
  };
}

/**
 * Whether a transaction is contained in the position.
 *
 * @param {Position} position
 * @param {number} xid
 */
export function contains(position, xid) {
  return xid < position.xmin || (xid < position.xmax && !position.xip.includes(xid));
}

/**
 * Whether `later` contains every transaction of `earlier`.
 *
 * @param {string} later
 * @param {string} earlier
 */
export function covers(later, earlier) {
  const [one, other] = [parsePosition(later), parsePosition(earlier)];
  return (
    one.log === other.log &&
    one.xmax >= other.xmax &&
    one.xip.every((xid) => xid >= other.xmax || other.xip.includes(xid))
  );
}

/**
 * Whether a position is before another, so that a result there may lack what the other contains.
 *
 * @param {string} text
 * @param {string} other
 */
export function isBefore(text, other) {
  if (!covers(other, text) || covers(text, other)) return false;
  const { xmin, xmax, xip } = parsePosition(text);
  // With very many open transactions a gateway rounds a position down to this form.
  const mayBeRounded = !xip.length && xmin === xmax && xmin >= parsePosition(other).xmin;
  return !mayBeRounded;
}
