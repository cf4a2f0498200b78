/** The tokens of the shop's people. */

/** @param {string} person */
export async function tokenOf(person) {
  const answer = await fetch(`/demo/tokens/${person}`, { method: "POST" });
  if (!answer.ok) {
    throw new Error(`the demo gave no token for ${person} (status ${answer.status}); restart it`);
  }
  return (await answer.json()).token;
}
