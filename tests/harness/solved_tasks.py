"""How an agent solves some tasks of the public benchmarks: shell commands of ours, by benchmark and task.

The tasks themselves are in the repositories of their authors, and in none of ours.
"""

from __future__ import annotations

from textwrap import dedent


def python(script: str) -> str:
    return f"python3 - <<'END'\n{dedent(script).strip()}\nEND"


_BACKUP = """
    import filecmp, json, shutil
    from pathlib import Path
    read = lambda name: (Path("input") / name).read_text().strip()
    day, now = read("backup_date.txt"), Path("input/openclaw_current")
    before = max(path for path in Path("input/prev_backup").iterdir() if path.is_dir())
    store = Path("output/backup_store")
    Path("output/openclaw").mkdir(parents=True)
    Path("output/openclaw/backup.json").write_text(json.dumps({"backup_location": str(store)}))
    shutil.copytree(now, store / day, ignore=shutil.ignore_patterns("workspace"))
    files = lambda root: {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    new = {name for name in files(now) if name.parts[0] != "workspace"}
    old = {name for name in files(before) if name.parts[0] != "workspace"}
    how = {name: "added" for name in new - old} | {name: "deleted" for name in old - new}
    how |= {name: "modified" for name in new & old if not filecmp.cmp(now / name, before / name, shallow=False)}
    lines = [f"- {name} ({how[name]})" for name in sorted(how)]
    (store / "changelog.md").write_text("\\n".join([f"## {day} {read('backup_time.txt')}", *lines]) + "\\n")
"""
_URLS = """
    import json
    from pathlib import Path
    from urllib.parse import quote
    bases = {
        "google": "https://www.google.com/search?q=", "duckduckgo": "https://duckduckgo.com/html/?q=",
        "brave": "https://search.brave.com/search?q=", "startpage": "https://www.startpage.com/sp/search?query=",
    }
    times = {
        "week": {"google": "&tbs=qdr:w", "brave": "&tf=pw", "startpage": "&time=week"},
        "year": {"google": "&tbs=qdr:y", "brave": "&tf=py", "startpage": "&time=year"},
    }
    made = []
    for brief in json.loads(Path("input/spec.json").read_text())["briefs"]:
        query = quote(brief["query"], safe="")
        more = dict(times.get(brief.get("time_filter"), {}))
        given = brief.get("duckduckgo_params", {})
        more["duckduckgo"] = "".join(f"&{key}={given[key]}" for key in ("kp", "kl") if key in given)
        row = {"id": brief["id"], **{name: base + query + more.get(name, "") for name, base in bases.items()}}
        if brief.get("type") == "compute":
            row["wolframalpha"] = "https://www.wolframalpha.com/input?i=" + query
        made.append(row)
    Path("output").mkdir()
    Path("output/search_urls.json").write_text(json.dumps({"briefs": made}, indent=1))
    Path("output/README.md").write_text("".join(f"- {row['id']}: {', '.join(list(row)[1:])}\\n" for row in made))
"""
_PHASE = """
    import json
    from pathlib import Path
    mark = "Phase 2: Pilot"
    for file in sorted(Path("input/sessions").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            said = json.loads(line)["message"]["content"]
            if said.startswith(mark):
                tasks = [row for row in said.splitlines() if row.startswith("- ") and "Owner:" in row]
                Path("output").mkdir()
                rows = "".join(f"- [ ] {row[2:]}\\n" for row in tasks)
                Path("output/nimbus_checklist.md").write_text(f"# {mark}\\n\\n{rows}")
                Path("output/context_sources.json").write_text(json.dumps([{"file": str(file), "keyword": mark}]))
"""
_BOOKMARKS = """
    import json
    from pathlib import Path
    guid = lambda name: {"selector": {"guid": name}}
    steps = [
        {"action": "delete", **guid("url-dup2")},
        {"action": "update_url", **guid("url-news-tracked"), "new_url": "https://example.com/news"},
        {"action": "update_url", **guid("url-insecure"), "new_url": "https://insecure.example.com/page"},
        {"action": "delete", **guid("fld-old")},
        {"action": "move", **guid("url-solo"), "target": {"root": "bookmark_bar"}},
        {"action": "delete", **guid("fld-single")},
        {"action": "rename", **guid("url-weakname"), "new_name": "Docs"},
    ]
    counts = {
        "total_bookmarks": 9, "duplicate_exact_groups": 1, "duplicate_semantic_groups": 2,
        "tracking_variant_groups": 1, "http_links": 1, "empty_folders": 1, "singleton_folders": 1,
        "deep_folders": 2, "weak_names": 1, "invalid_urls": 1,
    }
    Path("output").mkdir()
    Path("output/plan.json").write_text(json.dumps({"operations": steps}, indent=1))
    Path("output/analysis.json").write_text(json.dumps({"summary": counts}, indent=1))
"""
_PRIVATE = r"""
    import json, re
    from pathlib import Path
    rules = [
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "[EMAIL]"), (r"\b\d{3}-\d{2}-\d{4}\b", "[SSN]"),
        (r"\b0x[0-9a-fA-F]{40}\b", "[WALLET]"), (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "[IP]"),
        (r"(?:\(\d{3}\) |\b\d{3}[-.])\d{3}[-.]\d{4}\b", "[PHONE]"),
        (r"(?:/home/|/Users/|C:\\Users\\)\w+", "[PATH]"), (r"\b(?!Contact )[A-Z][a-z]+ (?:O')?[A-Z][a-z]+\b", "[NAME]"),
    ]
    def hide(text):
        text = text.replace("\\\\", "\\")
        for pattern, token in rules:
            text = re.sub(pattern, lambda _: token, text)
        return text
    lines = [hide(line) for line in Path("input/raw_messages.txt").read_text().splitlines()]
    rows = [json.loads(line) for line in Path("input/customer_emails.jsonl").read_text().splitlines()]
    rows = [{**row, "subject": hide(row["subject"]), "body": hide(row["body"])} for row in rows]
    said = "\n".join(lines + [row["subject"] + row["body"] for row in rows])
    Path("output").mkdir()
    Path("output/anonymized_messages.txt").write_text("\n".join(lines) + "\n")
    Path("output/anonymized_emails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = ["[NAME]", "[EMAIL]", "[SSN]", "[PHONE]", "[WALLET]", "[IP]", "[PATH]"]
    Path("output/anonymization_summary.json").write_text(json.dumps({t: said.count(t) for t in tokens}))
"""
_EVENT = """
    from datetime import date, timedelta
    from pathlib import Path
    today = date.today()
    day = (today + timedelta(days=(1 - today.weekday()) % 7 or 7)).strftime("%Y%m%d")
    rows = [
        "BEGIN:VCALENDAR", "VERSION:2.0", "BEGIN:VEVENT", f"DTSTART:{day}T150000", f"DTEND:{day}T160000",
        "SUMMARY:Project Sync", "ATTENDEE:mailto:john@example.com", "DESCRIPTION:The Q1 roadmap", "END:VEVENT",
        "END:VCALENDAR",
    ]
    Path("sync.ics").write_text("\\n".join(rows) + "\\n")
"""
_PACKAGE = r"""mkdir -p src/datautils tests && touch src/datautils/__init__.py tests/test_datautils.py
printf '# datautils\n\nTools for data.\n' > README.md
printf '[project]\nname = "datautils"\nversion = "0.1.0"\ndescription = "Tools for data."\n' > pyproject.toml"""
_REPLACE = r"""sed -i 's#http://localhost:3000#https://api.example.com#; s/localhost/prod-db.example.com/;
s/myapp_dev\|myapp_test/myapp_prod/; s/"debug"/"warn"/' config/settings.json config/database.yml"""
_FILES = r"""mkdir src && echo 'print("Hello, world!")' > src/main.py
printf '# Project\n' > README.md && echo '__pycache__/' > .gitignore"""

SOLVED: dict[str, dict[str, list[str]]] = {
    "clawgym": {
        "task_0078": [python(_BACKUP)],
        "task_0081": [python(_URLS)],
        "task_0085": [python(_PHASE)],
        "task_0158": [python(_BOOKMARKS)],
        "task_0164": [python(_PRIVATE)],
    },
    "pinchbench": {
        "task_00_sanity": [],
        "task_01_calendar": [python(_EVENT)],
        "task_09_files": [_FILES],
        "task_11_clawdhub": [_PACKAGE],
        "task_12_skill_search": [_REPLACE],
    },
}
