"""The tool interface in its base variant (T0): real names, no distractors."""

EXECUTE_BASH = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": "Run a bash command in the workspace and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command line."}},
            "required": ["command"],
        },
    },
}

FILE_EDITOR = {
    "type": "function",
    "function": {
        "name": "file_editor",
        "description": "View, create or edit a text file.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": {"type": "string", "description": "Path of the file."},
                "file_text": {"type": "string", "description": "The whole text, for create."},
                "old_str": {"type": "string", "description": "Text to replace; must occur once."},
                "new_str": {"type": "string", "description": "The new text, for str_replace and insert."},
                "insert_line": {"type": "integer", "description": "Insert after this line; 0 is the top."},
            },
            "required": ["command", "path"],
        },
    },
}

TOOLS = [EXECUTE_BASH, FILE_EDITOR]
