/** The shop's people, each with a token of their own. */

/** @param {string} person */
export async function tokenOf(person) {
  const answer = await fetch(`/demo/tokens/${person}`, { method: "POST" });
  if (!answer.ok) throw new Error(`there is no token to be had: status ${answer.status}`);
  return (await answer.json()).token;
}
