"""`mqmesh completion`: script with which a shell completes commands, options, topics and groups."""

import click
from click.shell_completion import get_completion_class

from .options import json_option
from .render import print_answer, print_text


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
@json_option
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, topics and groups.

    \b
    Examples:
      eval "$(mqmesh completion bash)"
      mqmesh completion fish > ~/.config/fish/completions/mqmesh.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(context.find_root().command, {}, "mqmesh", "_MQMESH_COMPLETE").source()
    if print_answer({"shell": shell, "source": source}):
        print_text(source)
