"""The real ALFWorld engine (TextWorld + Fast Downward) with caches around it: the same bytes out, many times faster.

The stock engine translates PDDL four times a game, parses grammar and queries anew at every step, deep-copies every
derivation context, keeps every proposition it ever met, and loads a private copy of a 34 MB library for each
environment. Here translations (translation.py) and grammar (grammar.py) are cached, a library copy is shared by all
episodes of one game, and the classes below override the slow methods of PddlState and PddlEnv. Nothing is patched.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fast_downward
from textworld.core import EnvInfos, Environment, GameState
from textworld.envs.pddl import PddlEnv
from textworld.envs.pddl.logic import PddlState
from textworld.generator.game import EntityInfo
from textworld.logic import Proposition, Variable

from training.envs.grammar import Binding, Context, Facts, Logic, Signature, load_logic
from training.envs.translation import Translation, translate, translate_for_planning

_LOCK = threading.RLock()
_LIBRARIES: list[Library] = []


class Library:
    """One loaded copy of libdownward: it holds one game at a time, and any number of episodes of that game."""

    def __init__(self) -> None:
        self.c = fast_downward.load_lib()
        self.lock = threading.RLock()
        self.game: str | None = None
        self.episodes = 0
        self.initial: Mapping[Signature, frozenset[tuple[str, ...]]] = {}
        self.initial_id = 0

    def load(self, translation: Translation) -> None:
        self.c.load_sas(translation.sas_bytes)
        self.initial_id = self.c.get_state_id()
        atoms = (fast_downward.Atom * self.c.get_state_size())()
        self.c.get_state(atoms)
        rows: dict[Signature, set[tuple[str, ...]]] = defaultdict(set)
        for name, arguments in translation.facts:
            rows[name, tuple(translation.objects[a] for a in arguments)].add(arguments)
        for atom in atoms:
            signature, row = parse_atom(atom.name, translation.objects)
            if not signature[0].startswith("not_"):
                rows[signature].add(row)
        self.initial = {signature: frozenset(found) for signature, found in rows.items()}
        self.game = translation.key


def parse_atom(text: str, types: Mapping[str, str]) -> tuple[Signature, tuple[str, ...]]:
    """Signature and arguments of Fast Downward's "Atom name(a, b)" or "NegatedAtom name(a, b)"."""
    kind, rest = text.split(" ", 1)
    name, arguments = rest.split("(", 1)
    row = tuple(a for a in arguments[:-1].split(", ") if a)
    names = tuple(a.upper() if a in ("i", "p") else a for a in row)  # as TextWorld spells these two
    signature = ("not_" + name if kind == "NegatedAtom" else name), tuple(types[a] for a in row)
    return signature, names


def borrow(translation: Translation) -> Library:
    """The library that holds this game, else an idle one with the game loaded, else a new copy."""
    with _LOCK:
        library = next((x for x in _LIBRARIES if x.game == translation.key), None)
        if library is None:
            library = next((x for x in _LIBRARIES if not x.episodes), None)
            if library is None:
                library = Library()
                _LIBRARIES.append(library)
            library.game = None
            library.load(translation)
        library.episodes += 1
        return library


def give_back(library: Library) -> None:
    with _LOCK:
        library.episodes -= 1


@dataclass(eq=False)
class Action:
    """An applicable operator and the command that names it."""

    id: int
    name: str
    mapping: Binding
    command_template: str
    feedback_rule: str
    n_effects: int

    def format_command(self, names: Mapping[str, str]) -> str:
        return self.command_template.format(**names)


class EngineState(PddlState):
    """PddlState with facts as plain rows, over a library shared with other episodes of the same game."""

    def __init__(self, translation: Translation, game: Mapping[str, Any], logic: Logic):
        # No super().__init__: it would translate twice.
        self._game = game
        self._library = borrow(translation)
        self.downward_lib = self._library.c
        self._planning_sas: bytes | None = None
        self._id = self._library.initial_id
        self._parameters = translation.actions
        self._logic = logic
        self.name2type = translation.objects
        self.fact_rows = Facts(self._library.initial)

    def close(self) -> None:
        if self._library is not None:
            give_back(self._library)
            self._library = None

    @property
    def facts(self) -> Iterator[Proposition]:
        for (name, types), rows in self.fact_rows.rows.items():
            for row in rows:
                yield Proposition(name, [Variable(*pair) for pair in zip(row, types, strict=True)])

    def all_applicable_actions(self) -> list[Action]:
        c = self._library.c
        with self._library.lock:
            c.set_state_id(self._id)
            operators = (fast_downward.Operator * c.get_applicable_operators_count())()
            c.get_applicable_operators(operators)
        actions: dict[str, Action] = {}
        for operator in operators:
            text = operator.name
            if text in actions:
                continue
            name, *arguments = text.split()
            mapping = {ph: (a, ph[1]) for ph, a in zip(self._parameters[name], arguments, strict=False)}
            spelled = self._logic.actions[name]
            actions[text] = Action(
                operator.id, name, mapping, spelled.template, spelled.feedback_rule, operator.nb_effect_atoms
            )
        return list(actions.values())

    def apply(self, action: Action) -> None:
        effects = (fast_downward.Atom * action.n_effects)()
        with self._library.lock:
            self._library.c.set_state_id(self._id)
            self._library.c.apply_operator(action.id, effects)
            self._id = self._library.c.get_state_id()
        for effect in effects:
            (name, types), row = parse_atom(effect.name, self.name2type)
            opposite = name.split("not_", 1)[1] if name.startswith("not_") else "not_" + name
            self.fact_rows.remove((opposite, types), row)
            self.fact_rows.add((name, types), row)

    def check_goal(self) -> bool:
        with self._library.lock:
            self._library.c.set_state_id(self._id)
            return self._library.c.check_goal()

    def replan(self, infos: Mapping[str, EntityInfo]) -> list[str]:
        """Commands that win from here. Only here is the second, search-oriented translation made."""
        if self._planning_sas is None:
            self._planning_sas = translate_for_planning(self._game["pddl_domain"], self._game["pddl_problem"]).encode()
        with self._library.lock:
            self._library.c.set_state_id(self._id)
            self._library.c.load_sas_replan(self._planning_sas)
            return super().replan(infos)

    def plan_to_templated_actions(self, plan: list[str], infos: Mapping[str, EntityInfo]) -> list[str]:
        commands = []
        for name, *arguments in map(str.split, plan):
            values = {ph[0]: infos[a].name for ph, a in zip(self._parameters[name], arguments, strict=False)}
            template = "go to {r}" if name == "gotolocation" else self._logic.actions[name].template
            commands.append(template.format(**values))
        return commands


class Engine(PddlEnv):
    """PddlEnv over the caches; load, reset and step answer what the stock class answers."""

    def __init__(self, infos: EnvInfos | None = None) -> None:
        Environment.__init__(self, infos)  # not PddlEnv's: it would load a library copy of its own
        self._pddl_state: EngineState | None = None

    def close(self) -> None:
        if self._pddl_state is not None:
            self._pddl_state.close()
            self._pddl_state = None

    def _new_state(self) -> EngineState:
        self.close()
        return EngineState(self._translation, self._game_data, self._logic)

    def load(self, filename_or_data: str | Mapping[str, Any]) -> None:
        if isinstance(filename_or_data, Mapping):
            data, self._game_file = filename_or_data, None
        else:
            with open(filename_or_data, encoding="utf-8") as file:
                data, self._game_file = json.load(file), filename_or_data
        self._game_data = data
        self.walkthrough = data.get("walkthrough")
        self._translation = translate(data["pddl_domain"], data["pddl_problem"])
        self._logic = load_logic(data["grammar"], tuple(self._translation.types))
        self._templates = sorted({action.template for action in self._logic.actions.values()})
        self._pddl_state = self._new_state()
        self._entity_infos = self._get_entity_infos()

    def _get_entity_infos(self) -> dict[str, EntityInfo]:
        infos: dict[str, EntityInfo] = {}
        for (_, types), rows in self._pddl_state.fact_rows.rows.items():
            for row in rows:
                for name, kind in zip(row, types, strict=True):
                    infos[name] = info = EntityInfo(name, kind)
                    info.name, info.definite, info.indefinite = name, "the", "a"
        return infos

    def _gather_infos(self) -> None:
        state = self._pddl_state
        self.state["command_templates"] = self._templates
        self.state["won"] = state.check_goal()
        self.state["lost"] = False
        self.state["_entity_infos"] = self._entity_infos
        if self.request_infos.facts:
            self.state["_facts"] = list(state.facts)
            self.state["facts"] = [self._get_human_readable_fact(fact) for fact in self.state["_facts"]]
        self.state["last_action"] = None
        self.state["_last_action"] = self._last_action
        actions = self.state["_valid_actions"] = state.all_applicable_actions()
        names = {key: info.name for key, info in self._entity_infos.items()}
        commands = self.state["_valid_commands"] = []
        for action in actions:
            context = Context.of(state.fact_rows, self._entity_infos, action.mapping)
            action.command_template = self._logic.grammar.derive(action.command_template, context)
            commands.append(action.format_command(names))
        self.state["admissible_commands"] = sorted(set(commands))
        if self.request_infos.moves:
            self.state["moves"] = self._moves
        if self.request_infos.policy_commands:
            self.state["policy_commands"] = state.replan(self._entity_infos)

    def reset(self) -> GameState:
        self._pddl_state = self._new_state()
        self.prev_state = None
        self.state = GameState()
        self._last_action = None
        self._moves = 0
        context = Context.of(self._pddl_state.fact_rows, self._entity_infos, {})
        self.state.feedback = self.state.raw = self._logic.grammar.derive("#intro#", context)
        self._gather_infos()
        if "walkthrough" in self.request_infos.extras:
            self.state["extra.walkthrough"] = self.walkthrough or self._pddl_state.replan(self._entity_infos)
        return self.state

    def step(self, command: str) -> tuple[GameState, int, bool]:
        command = command.strip()
        self.prev_state, self.state = self.state, GameState()
        self.state.last_command = command
        self._last_action = None
        try:
            index = self.prev_state["_valid_commands"].index(command)
            self._last_action = action = self.prev_state["_valid_actions"][index]
            self._pddl_state.apply(action)
            context = Context.of(self._pddl_state.fact_rows, self._entity_infos, action.mapping)
            self.state.feedback = self._logic.grammar.derive(action.feedback_rule, context)
            self._moves += 1
        except ValueError:
            self.state.feedback = "Nothing happens."
        self.state.raw = self.state.feedback
        self._gather_infos()
        if "walkthrough" in self.request_infos.extras:
            self.state["extra.walkthrough"] = self.prev_state["extra.walkthrough"]
        self.state["score"] = 1 if self.state["won"] else 0
        self.state["done"] = self.state["won"] or self.state["lost"]
        return self.state, self.state["score"], self.state["done"]
