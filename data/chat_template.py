"""Chat templates of Hugging Face models, programs in the language of Jinja that write a dialog.

What a template may use is what transformers/utils/chat_template_utils.py (5.24) gives it. Not about
token ids: see data/tokenizer.py, nor about which of them are learned: see
finetuning/template.py.
"""

import json
import re
from datetime import datetime
from functools import cache, partial
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


@cache  # compiling takes far longer than rendering a dialog
def compile_template(source: str) -> Template:
    """Return a chat template that renders as in transformers."""
    # The tags {% generation %} and {% endgeneration %} stand around answers. They write nothing,
    # and limit the scope of variables, as Jinja's own {% with %} does.
    source = re.sub(r"({%[-+]?\s*(end)?)generation\b", r"\1with", source)
    # A sandbox, because a template is untrusted code. The options are those of transformers;
    # loopcontrols has the tags {% break %} and {% continue %}.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # Jinja's own filter escapes HTML, and json.dumps by default all that is not ASCII
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    # One time for all dialogs, so that the beginning of a dialog, rendered alone, is the same text.
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment.from_string(source)


def raise_exception(message: str) -> None:
    """Refuse a dialog: templates call this, as where roles do not alternate."""
    raise TemplateError(message)  # FileTokenizer.render turns it into a UserError


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that a template sees: none that is null, and not "weight",
    which is for the loss alone."""
    # templates would write a null as "None"
    fields = message.items()
    return {name: value for name, value in fields if value is not None and name != "weight"}
