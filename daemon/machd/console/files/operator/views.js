// The six views, in the order of their tabs.

import { LogView } from "./log.js";
import { MemoryView } from "./memory.js";
import { ModelsView } from "./models.js";
import { NowView } from "./now.js";
import { RequestsView } from "./requests.js";
import { SettingsView } from "./settings.js";

export const VIEWS = {
  now: { label: "Now", show: NowView },
  models: { label: "Models", show: ModelsView },
  memory: { label: "Memory", show: MemoryView },
  requests: { label: "Requests", show: RequestsView },
  settings: { label: "Settings", show: SettingsView },
  log: { label: "Log", show: LogView },
};
