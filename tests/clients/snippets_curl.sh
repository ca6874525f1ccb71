# Calls by curl, as people type them. Each function is one snippet; its last command decides.
# Run as: FILE URL SCRIPTED_URL
set -uo pipefail
URL="$1"
SCRIPTED="$2"
JSON='Content-Type: application/json'

# True if the input _holds each of the texts.
_holds() {
  local input text
  input="$(cat)"
  for text in "$@"; do
    case "$input" in *"$text"*) ;; *) echo "no $text in: $input" >&2; return 1 ;; esac
  done
}

a_chat() {
  curl -s "$URL/chat/completions" -H "$JSON" -H 'Authorization: Bearer none' -d '{
    "model": "tiny-python",
    "messages": [{"role": "user", "content": "def hello("}],
    "max_tokens": 8
  }' | _holds '"object":"chat.completion"' '"finish_reason":'
}

a_streamed_chat() {
  curl -sN "$URL/chat/completions" -H "$JSON" -d '{
    "model": "tiny-python", "messages": [{"role": "user", "content": "def hello("}],
    "max_tokens": 4, "stream": true
  }' | _holds 'data: {' 'data: [DONE]'
}

a_completion() {
  curl -s "$URL/completions" -H "$JSON" -d '{
    "model": "tiny-python", "prompt": "import ", "max_tokens": 4
  }' | _holds '"object":"text_completion"'
}

a_completion_with_whole_numbers_as_floats() {
  curl -s "$URL/completions" -H "$JSON" -d '{
    "prompt": "import ", "max_tokens": 1.0, "n": 2.0, "seed": 3.0
  }' | _holds '"index":1' '"completion_tokens":2'
}

unknown_fields_that_are_null() {
  curl -s "$URL/chat/completions" -H "$JSON" -d '{
    "messages": [{"role": "user", "content": "a", "weight": null}], "max_tokens": 1, "mood": null
  }' | _holds '"object":"chat.completion"'
}

unknown_fields_are_named() {
  curl -s "$URL/chat/completions" -H "$JSON" -d '{
    "messages": [{"role": "user", "content": "a"}], "mood": "good"
  }' | _holds '"param":"mood"' '"code":"unknown_field"'
}

a_response() {
  curl -s "$URL/responses" -H "$JSON" -d '{
    "model": "tiny-python", "input": "def f(", "max_output_tokens": 4
  }' | _holds '"object":"response"' '"type":"output_text"'
}

a_tool_call() {
  curl -s "$SCRIPTED/chat/completions" -H "$JSON" -d '{
    "model": "scripted",
    "messages": [{"role": "user", "content": "What is the weather in Bern?"}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {
      "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}],
    "tool_choice": "auto"
  }' | _holds '"finish_reason":"tool_calls"' '"name":"get_weather"' '"content":null'
}

json_by_a_schema() {
  curl -s "$URL/chat/completions" -H "$JSON" -d '{
    "messages": [{"role": "user", "content": "a"}], "max_tokens": 600,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {
      "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
      "additionalProperties": false}}}
  }' | _holds '\"yes\"'
}

the_models() {
  curl -s "$URL/models" | _holds '"object":"list"' '"id":"tiny-python"'
}

one_model() {
  curl -s "$URL/models/tiny-python" | _holds '"max_model_len":2048'
}

health() {
  [ "$(curl -s -o /dev/null -w '%{http_code}' "${URL%/v1}/health")" = 200 ]
}

tokens_of_a_text() {
  curl -s "${URL%/v1}/tokenize" -H "$JSON" -d '{"prompt": "def f(x):"}' | _holds '"count":'
}

embeddings_are_refused() {
  curl -s "$URL/embeddings" -H "$JSON" -d '{"input": "a"}' | _holds 'start one with --runner pooling'
}

a_status_for_scripts() {
  ! curl -sf "$URL/chat/completions" -H "$JSON" -d '{"model": "gone", "messages": []}'
}

a_body_from_a_file() {
  local file
  file="$(mktemp)"
  printf '{"prompt": "def f(", "max_tokens": 2}' > "$file"
  curl -s "$URL/completions" -H "$JSON" --data-binary @"$file" | _holds '"text":'
  local status=$?
  rm -f "$file"
  return $status
}

_quoted() {
  local text="${1//\\/\\\\}"
  text="${text//\"/\\\"}"
  printf '"%s"' "$(printf '%s' "$text" | tr '\n\t\r' '   ')"
}

for name in $(grep -oE '^[a-z]\w*\(\) \{' "$0" | tr -d '(){ '); do
  if error="$("$name" 2>&1)"; then error=null; else error="$(_quoted "it failed: $error")"; fi
  printf '{"file": "snippets_curl.sh", "name": "%s", "error": %s}\n' "$name" "$error"
done
