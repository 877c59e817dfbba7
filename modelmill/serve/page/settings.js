// The settings dialog.
import { $, closeByBackdrop } from "./dom.js";
import { drawPresets, showSystemPrompt, startPresets } from "./presets.js";
import { rememberRequestSettings, resetRequestSettings, showRequestSettings } from "./request_settings.js";
import { rememberSampling, resetSampling, showSampling, startSampling } from "./sampling.js";
import { keep, kept } from "./storage.js";

function remember() {
  rememberSampling();
  rememberRequestSettings();
  keep("key", $("key").value.trim());
  keep("theme", $("theme").value);
  document.documentElement.dataset.theme = $("theme").value;
}

/** Show what is kept: another tab may have changed it. */
function show() {
  showSampling();
  showRequestSettings();
  $("key").value = kept("key") || "";
  $("theme").value = kept("theme") || "";
  document.documentElement.dataset.theme = $("theme").value;
}

/** @param {string} [focus] id of the element that gets the focus */
export function openSettings(focus) {
  if (!$("settings").open) $("settings").showModal();
  if (focus) $(focus).focus();
}

/**
 * @param {() => void} closed is called when the dialog is closed
 * @param {() => void} prompted is called when the system prompt has changed
 */
export function start(closed, prompted) {
  startSampling();
  startPresets(prompted);
  show();
  window.addEventListener("storage", () => {
    drawPresets();
    if (!$("settings").open) show();
  });
  $("open-settings").addEventListener("click", () => openSettings());
  $("settings").addEventListener("input", remember);
  $("defaults").addEventListener("click", () => {
    resetSampling();
    resetRequestSettings();
    showSystemPrompt("");
    prompted();
    remember();
  });
  $("settings").addEventListener("close", () => { remember(); closed(); });
  closeByBackdrop($("settings"));
}
