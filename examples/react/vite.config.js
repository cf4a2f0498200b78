import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

const target = process.env.SERVER ?? "http://localhost:8000";

export default defineConfig({
  plugins: [react()],
  // The page talks to its own origin. While it is developed that is Vite, which passes it on.
  server: { proxy: { "/live": { target, ws: true } } },
  // Needed only while `headwater` is a folder beside this one: there is one React, and it is here.
  resolve: { dedupe: ["react"] },
});
