"""``modelmill launch``: points a coding agent at a running server."""

from __future__ import annotations

import http
import http.client
import json
import os
import shlex
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_json, print_note
from modelmill.cli.stop import find_server
from modelmill.core.config import option_field
from modelmill.core.env import child_process_env
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.server_records import ServerRecord, list_running_and_prune_stale
from modelmill.eval.openai_client import model_cards, text_model_cards

HELP = "Point a coding agent (claude, codex, opencode) at a running server."
EPILOG = """Without --run it prints the command with its environment, to copy or to evaluate.

Examples:

  modelmill launch claude

  modelmill launch codex --model qwen3 --run

  modelmill launch opencode --url http://10.0.0.5:8000 --model qwen3 --api-key KEY"""

PLACEHOLDER_API_KEY = "none"
"""For clients that refuse to start without a key; a server without keys ignores it."""
KEY_CHECK_TIMEOUT_SECONDS = 2.0
"""How long a server may take to tell whether it takes the key."""
CONTEXT_PER_OUTPUT_RATIO = 4
"""OpenCode keeps a part of the context for an answer: one of four."""


@dataclass(frozen=True)
class LaunchCommand:
    """A client's command line and what is added to its environment."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def shell_text(self) -> str:
        """The command as a line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class AgentModel:
    """A served model, as an agent reaches it.

    Attributes:
        url: address of the server, without /v1.
        name: under which it is served.
        key: of the server.
        context: tokens that fit into it; None if the server did not tell. Agents shorten a
            conversation in time only if they know it: Claude Code assumes 200,000 tokens of
            a model that it does not know, Codex 272,000, OpenCode never shortens.
    """

    url: str
    name: str
    key: str = PLACEHOLDER_API_KEY
    context: int | None = None


def claude_command(model: AgentModel) -> LaunchCommand:
    """Claude Code over Anthropic Messages; every model class is the one served.

    A key of Anthropic in the environment would be sent to the server, so it is emptied.
    """
    classes = ("FABLE", "OPUS", "SONNET", "HAIKU")
    env = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_AUTH_TOKEN": model.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": model.name,
        **{f"ANTHROPIC_DEFAULT_{each}_MODEL": model.name for each in classes},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if model.context is not None:
        names = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
        env |= dict.fromkeys(names, str(model.context))
    return LaunchCommand(("claude", "--model", model.name), env)


def codex_command(model: AgentModel) -> LaunchCommand:
    """Codex over OpenAI Responses; values of -c are TOML."""
    provider = (
        f'{{name = "modelmill", base_url = "{model.url}/v1", wire_api = "responses", '
        'env_key = "MODELMILL_API_KEY"}'
    )
    settings = [f"model_providers.modelmill={provider}", "model_provider=modelmill"]
    if model.context is not None:
        settings.append(f"model_context_window={model.context}")
    words = [word for setting in settings for word in ("-c", setting)]
    return LaunchCommand(("codex", *words, "--model", model.name), {"MODELMILL_API_KEY": model.key})


def opencode_command(model: AgentModel) -> LaunchCommand:
    """OpenCode over OpenAI chat completions; its whole configuration is one variable."""
    card: dict[str, Any] = {"name": model.name}
    if model.context is not None:
        card["limit"] = {
            "context": model.context,
            "output": model.context // CONTEXT_PER_OUTPUT_RATIO,
        }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "modelmill",
        "options": {"baseURL": f"{model.url}/v1", "apiKey": model.key},
        "models": {model.name: card},
    }
    config = {"provider": {"modelmill": provider}, "model": f"modelmill/{model.name}"}
    return LaunchCommand(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


AGENT_COMMAND_MAKERS: Mapping[str, Callable[[AgentModel], LaunchCommand]] = {
    "claude": claude_command,
    "codex": codex_command,
    "opencode": opencode_command,
}


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill launch``."""

    client: str = option_field(
        help="the agent", positional=True, choices=tuple(AGENT_COMMAND_MAKERS)
    )
    url: str | None = option_field(None, "address of the server (default: the one that runs here)")
    model: str | None = option_field(
        None,
        "served model (default: the server's first)",
        complete=lambda: [
            model for each in list_running_and_prune_stale() for model in each.models
        ],
    )
    api_key: str = option_field(PLACEHOLDER_API_KEY, "key of the server, if it has keys")
    run: bool = option_field(
        False, "start the agent instead of printing its command", flags=("--run",)
    )


def run(args: Args) -> int:
    """Print the command, or become the agent."""
    url, chosen = resolve_server_and_model(args)
    if args.run:
        find_agent_program(args.client)
    models = fetch_models(url, args.api_key)
    model = first_listed_model(models) if chosen is None else chosen
    context = served_context_length(models, model)
    command = AGENT_COMMAND_MAKERS[args.client](AgentModel(url, model, args.api_key, context))
    if args.json:
        print_json({"command": list(command.words), "env": dict(command.env)})
    elif args.run:
        exec_agent_command(command)
    else:
        print(command.shell_text())
    return 0


def find_agent_program(name: str) -> str:
    """Return the agent's path. Raises ModelmillError if it is not installed."""
    program = shutil.which(name)
    if program is None:
        raise ModelmillError(f"there is no {name} on the PATH; install it first")
    return program


def exec_agent_command(command: LaunchCommand) -> NoReturn:
    """Replace this process by the agent. Raises ModelmillError if it is not installed."""
    os.execve(
        find_agent_program(command.words[0]),
        list(command.words),
        {**child_process_env(), **command.env},
    )


def resolve_server_and_model(args: Args) -> tuple[str, str | None]:
    """Return the address without a slash at its end, and the model's name.

    The name is None for the first model that a server at another address lists.

    Raises:
        UsageError: if no server, or no model, can be chosen.
    """
    if args.url is not None:
        if '"' in args.url or not args.url.startswith(("http://", "https://")):
            raise UsageError(f"--url {args.url} is no http:// or https:// address")
        return args.url.rstrip("/").removesuffix("/v1"), args.model
    servers = list_running_and_prune_stale()
    server = _select_server(servers, args.model)
    return server.client_url, args.model or server.models[0]


def first_listed_model(models: Any) -> str:
    """Return the name of the first model in a server's list that generates text.

    Raises:
        UsageError: if the list has none.
    """
    for card in text_model_cards(models):
        if isinstance(card["id"], str):
            return card["id"]
    raise UsageError("the server lists no model; give --model: the name under which it is served")


def served_context_length(models: Any, name: str) -> int | None:
    """Return a model's length of context from the server's list; None if the list lacks it."""
    for card in model_cards(models):
        if card["id"] == name:
            length = card.get("max_model_len")
            return length if isinstance(length, int) else None
    return None


def fetch_models(url: str, key: str) -> Any:
    """Return the server's list of models; None from a server that does not answer now.

    Raises:
        UsageError: if it refuses the key, or if address or key cannot be sent.
    """
    headers = {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=KEY_CHECK_TIMEOUT_SECONDS) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            which = "another" if key != PLACEHOLDER_API_KEY else "an"
            raise UsageError(f"{url} wants {which} API key; give --api-key KEY") from None
    except OSError as error:
        print_note(f"{url} does not answer now: {getattr(error, 'reason', error)}")
    except (ValueError, http.client.InvalidURL):  # the error itself may show the key
        raise UsageError(f"{url} or the API key has a character that cannot be sent") from None
    except http.client.HTTPException as error:
        print_note(f"{url} does not answer now: {error}")
    else:
        try:
            return json.loads(text)
        except ValueError:
            print_note(f"{url}/v1/models is no JSON; is it a server of modelmill?")
    return None


def _select_server(servers: list[ServerRecord], model: str | None) -> ServerRecord:
    if not servers:
        raise UsageError("no server is running; start one with modelmill serve, or give --url")
    if model is not None:
        return find_server(servers, model)
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        raise UsageError(f"several servers run ({urls}); give --model or --url")
    return servers[0]
