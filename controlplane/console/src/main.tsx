import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { BrowserRouter } from "react-router";
import { SIGNED_OUT } from "./api/client";
import { Problem } from "./api/problem";
import { App } from "./app";
import "./styles.css";

const queries = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 2_000,
      retry: (count, error) => count < 3 && !(error instanceof Problem && error.status >= 400 && error.status < 500),
    },
  },
});

// A session that ended anywhere shows the sign-in; what was typed stays in its page until then.
window.addEventListener(SIGNED_OUT, () => queries.setQueryData(["me"], null));

const root = document.getElementById("root");
if (root)
  createRoot(root).render(
    <StrictMode>
      <QueryClientProvider client={queries}>
        <BrowserRouter>
          <App />
        </BrowserRouter>
      </QueryClientProvider>
    </StrictMode>,
  );
