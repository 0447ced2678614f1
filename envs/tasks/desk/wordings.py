"""How each family says what it wants: the phrasings for training, and those kept for a second held-out set.

Invariant: a held-out phrasing uses no word that the training phrasings (of any family) do not use;
only the sentence is new.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wordings:
    """Format strings over the slots of a case. ``heldout`` ones appear in the split ``wording`` only."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]


WORDINGS: dict[tuple[str, int], Wordings] = {
    ("read", 1): Wordings(
        train=(
            "Read {source} and write its word to {target}.",
            "Copy the word in {source} to {target}.",
            "Take the word from {source} and put it into {target}.",
            "The word in {source} should also be in {target}.",
        ),
        heldout=(
            "Write the word from {source} to {target}.",
            "Take the word in {source} and put it into {target}.",
        ),
    ),
    ("read", 2): Wordings(
        train=(
            "Read {source} and {second} and write their words to {target}, one on each line.",
            "Copy the words in {source} and {second} to {target}, one on each line.",
            "Take the words from {source} and {second} and put them into {target}, one on each line.",
        ),
        heldout=("Write the words from {source} and {second} to {target}, one on each line.",),
    ),
    ("grep", 1): Wordings(
        train=(
            "Find the lines with {word} in {source} and write them to {target}.",
            "Put the lines with {word} from {source} into {target}.",
            "All lines that contain {word} in {source} should also be in {target}.",
            "Search for {word} in {source} and put the lines into {target}.",
        ),
        heldout=(
            "Copy the lines that contain {word} from {source} to {target}.",
            "Find {word} in {source} and write the lines to {target}.",
        ),
    ),
    ("grep", 2): Wordings(
        train=(
            "Find the lines with {word} in {source} and then in {second} and write them to {target}.",
            "Put the lines that contain {word} from {source} and then from {second} into {target}.",
            "Search for {word} in {source} and then in {second} and put the lines into {target}.",
        ),
        heldout=("Copy the lines that contain {word} from {source} and then from {second} to {target}.",),
    ),
    ("count", 1): Wordings(
        train=(
            "Count the lines with {word} in {source} and write the number to {target}.",
            "How many lines contain {word} in {source}? Put the number into {target}.",
            "Put the number of lines with {word} in {source} into {target}.",
            "Count how many lines contain {word} in {source}; the number goes to {target}.",
        ),
        heldout=(
            "Write the number of lines that contain {word} in {source} to {target}.",
            "Count {word} in {source} and put the number of lines into {target}.",
        ),
    ),
    ("count", 2): Wordings(
        train=(
            "Count the lines with {word} in {source} and {second} together and write the number to {target}.",
            "Put the number of lines with {word} in {source} and {second} together into {target}.",
            "Count how many lines contain {word} in {source} and {second}; the number goes to {target}.",
        ),
        heldout=("Write the number of lines that contain {word} in {source} and {second} together to {target}.",),
    ),
    ("sum", 1): Wordings(
        train=(
            "Add up column {column} of {source} and write the sum to {target}.",
            "Put the sum of column {column} of {source} into {target}.",
            "Sum column {column} in {source}; the number goes to {target}.",
            "The sum of column {column} in {source} should be in {target}.",
        ),
        heldout=(
            "Write the sum of column {column} in {source} to {target}.",
            "Add up column {column} in {source} and put the number into {target}.",
        ),
    ),
    ("sum", 2): Wordings(
        train=(
            "Add up column {column} of {source} and {second} together and write the sum to {target}.",
            "Put the sum of column {column} of {source} and {second} together into {target}.",
            "Sum column {column} in {source} and {second} together; the number goes to {target}.",
        ),
        heldout=("Write the sum of column {column} in {source} and {second} together to {target}.",),
    ),
    ("write", 1): Wordings(
        train=(
            "Create {target} with the line {text}.",
            "Make a new file {target} that holds the line {text}.",
            "Make {target} and write {text} in it.",
            "A new file {target} should contain the line {text}.",
        ),
        heldout=("Create a new file {target} with {text} in it.", "Make {target} with the line {text}."),
    ),
    ("write", 2): Wordings(
        train=(
            "Create {target} in a new folder {folder} with the line {text} and then the line {more}.",
            "A new file {target} in a new folder {folder} should contain the line {text} and then {more}.",
            "Make a folder {folder} and {target} in it and write {text} and then {more}, each on its line.",
        ),
        heldout=("Make {target} in a new folder {folder} with the line {text} and then the line {more}.",),
    ),
    ("append", 1): Wordings(
        train=(
            "Append the line {word} to {source}.",
            "Add the line {word} at the end of {source}.",
            "Put {word} on a new last line of {source}.",
            "Add {word} as the last line of {source}; keep the other lines.",
        ),
        heldout=(
            "Add a new line {word} to the end of {source}.",
            "Append {word} as the last line of {source}.",
        ),
    ),
    ("append", 2): Wordings(
        train=(
            "Append the line {word} to {source} and to {second}.",
            "Add the line {word} at the end of {source} and at the end of {second}.",
            "Put {word} on a new last line of {source} and of {second}.",
        ),
        heldout=("Append the line {word} at the end of {source} and of {second}.",),
    ),
    ("move", 1): Wordings(
        train=(
            "Rename {source} to {target}.",
            "Move {source} to {target}.",
            "Give {source} the new name {target}.",
            "The file {source} should be called {target}; keep no old file.",
        ),
        heldout=(
            "Give the file {source} the name {target}; keep no old file.",
            "Move the file {source} to the name {target}.",
        ),
    ),
    ("move", 2): Wordings(
        train=(
            "Move {source} and {second} to a new folder {folder}.",
            "Make a folder {folder} and move {source} and {second} to it.",
            "The files {source} and {second} should be in a new folder {folder}; keep no old file.",
        ),
        heldout=("Make a new folder {folder} and put {source} and {second} into it; keep no old file.",),
    ),
    ("head", 1): Wordings(
        train=(
            "Write the first {lines} lines of {source} to {target}.",
            "Put the first {lines} lines from {source} into {target}.",
            "Take the top {lines} lines of {source} and put them into {target}.",
            "The first {lines} lines in {source} should also be in {target}.",
        ),
        heldout=(
            "Copy the first {lines} lines of {source} to {target}.",
            "Put the top {lines} lines of {source} into {target}.",
        ),
    ),
    ("head", 2): Wordings(
        train=(
            "Write the first {lines} lines of {source} and then of {second} to {target}.",
            "Put the first {lines} lines from {source} and then from {second} into {target}.",
            "Take the top {lines} lines of {source} and then of {second} and put them into {target}.",
        ),
        heldout=("Copy the first {lines} lines of {source} and then of {second} to {target}.",),
    ),
}
