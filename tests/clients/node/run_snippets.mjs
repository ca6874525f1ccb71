// Run files of snippets, every method of each file's default export:
// run_snippets.mjs URL SCRIPTED_URL FILE...
// Print a line of JSON for each snippet: its file, its name, and its error if it has failed.
const [url, scriptedUrl, ...files] = process.argv.slice(2);
process.env.OPENAI_BASE_URL = url;
process.env.OPENAI_API_KEY = "none";
globalThis.AI_SDK_LOG_WARNINGS = false;

for (const file of files) {
  const { default: make } = await import(new URL(`../${file}`, import.meta.url));
  for (const [name, snippet] of Object.entries(make({ url, scriptedUrl, model: "tiny-python" }))) {
    let error = null;
    try {
      await snippet();
    } catch (raised) {
      error = `${raised?.stack ?? raised} ${raised?.responseBody ?? ""}`;
    }
    process.stdout.write(`${JSON.stringify({ file, name, error })}\n`);
  }
}
