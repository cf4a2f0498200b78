import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { connect } from "headwater";
import { HeadwaterProvider } from "headwater/react";

import { App } from "./App.jsx";
import "./style.css";

// One client for the whole page. There is no login here, so all tabs may share its connection. For users,
// give it their token instead: connect("/live", { token }).
const client = connect("/live", { tabs: "everybody" });

createRoot(document.getElementById("root")).render(
  <StrictMode>
    <HeadwaterProvider client={client}>
      <App />
    </HeadwaterProvider>
  </StrictMode>,
);
