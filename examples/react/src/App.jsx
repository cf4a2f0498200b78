import { useState } from "react";
import { usePresence, useQuery, useStatus } from "headwater/react";

import { Board } from "./Board.jsx";
import { PlaceOrder } from "./PlaceOrder.jsx";
import { REGIONS } from "./orders.js";

export function App() {
  const [region, setRegion] = useState();
  return (
    <main>
      <header>
        <h1>Orders</h1>
        <Connection />
        <Viewers />
      </header>
      <Regions chosen={region} onChoose={setRegion} />
      <PlaceOrder region={region ?? REGIONS[0]} key={region} />
      <Board region={region} />
    </main>
  );
}

function Connection() {
  const status = useStatus();
  return <p className={`connection ${status}`}>{status}</p>;
}

/** Presence: how many pages are open, anywhere. One could have a name and a cursor as well. */
function Viewers() {
  const { members } = usePresence("board", {});
  return <p>{members.length} here</p>;
}

/** A reactive query: the server's function runs again when its result may have changed. */
function Regions({ chosen, onChoose }) {
  const { value: totals = [] } = useQuery("totals");
  const amounts = new Map(totals.map(({ region, amount }) => [region, amount]));
  const all = totals.reduce((sum, { amount }) => sum + amount, 0);
  return (
    <nav aria-label="Region">
      <Region name="All" amount={all} isChosen={!chosen} onClick={() => onChoose()} />
      {REGIONS.map((name) => (
        <Region
          key={name}
          name={name}
          amount={amounts.get(name) ?? 0}
          isChosen={chosen === name}
          onClick={() => onChoose(name)}
        />
      ))}
    </nav>
  );
}

function Region({ name, amount, isChosen, onClick }) {
  return (
    <button aria-pressed={isChosen} onClick={onClick}>
      {name} <b>{amount.toLocaleString("en")}</b>
    </button>
  );
}
