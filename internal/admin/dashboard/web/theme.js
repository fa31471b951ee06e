// Before the first paint, so that the page never flashes in the other colours.
try {
  const chosen = localStorage.getItem("shoal-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage is forbidden: the system's colours it is */ }
