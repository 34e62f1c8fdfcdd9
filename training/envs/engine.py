"""The real ALFWorld engine (TextWorld + Fast Downward) with caches around it: the same bytes out, many times faster.

The stock engine translates PDDL four times a game, parses grammar and queries anew at every step, deep-copies every
derivation context, keeps every proposition it ever met, and loads a private copy of a 34 MB library for each
environment. Here translations (translation.py) and grammar (grammar.py) are cached, a library copy is shared by all
episodes of one game, and the classes below override the slow methods of PddlState and PddlEnv. Nothing is patched.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from textworld.core import EnvInfos, Environment, GameState
from textworld.envs.pddl import PddlEnv
from textworld.envs.pddl.logic import PddlState
from textworld.generator.game import EntityInfo
from textworld.logic import Proposition, Variable

from training.envs.facts import Binding, Facts
from training.envs.grammar import Context, Logic, load_logic
from training.envs.library import borrow, give_back
from training.envs.translation import Translation, parse_atom, translate, translate_for_planning


@dataclass(eq=False, slots=True)
class Action:
    """An applicable operator and the command that names it."""

    id: int
    n_effects: int
    mapping: Binding
    command_template: str
    feedback_rule: str


class EngineState(PddlState):
    """PddlState with its facts as plain rows, over a library that other episodes of the same game share."""

    def __init__(self, translation: Translation, game: Mapping[str, Any], logic: Logic):
        # super().__init__ is not called: it translates the game twice.
        self._game = game
        self._logic = logic
        self._parameters = translation.actions
        self.name2type = translation.objects
        self.fact_rows = Facts(translation.initial)
        self._library = borrow(translation.key, translation.sas)
        self._id = self._library.initial
        self._planning_sas: bytes | None = None
        self.downward_lib = self._library.c
        self.close = weakref.finalize(self, give_back, self._library)  # runs once: here, or when forgotten

    @property
    def facts(self) -> Iterator[Proposition]:
        for (name, types), rows in self.fact_rows.rows.items():
            for row in rows:
                yield Proposition(name, [Variable(*pair) for pair in zip(row, types, strict=True)])

    def all_applicable_actions(self) -> list[Action]:
        actions: dict[str, Action] = {}
        for operator in self._library.applicable(self._id):
            if operator.text not in actions:
                name, *arguments = operator.text.split()
                mapping = {ph: (a, ph[1]) for ph, a in zip(self._parameters[name], arguments, strict=False)}
                text = self._logic.actions[name]
                action = Action(operator.id, operator.n_effects, mapping, text.template, text.feedback_rule)
                actions[operator.text] = action
        return list(actions.values())

    def apply(self, action: Action) -> None:
        self._id, effects = self._library.apply(self._id, action.id, action.n_effects)
        for effect in effects:
            (name, types), row = parse_atom(effect, self.name2type)
            opposite = name.removeprefix("not_") if name.startswith("not_") else "not_" + name
            self.fact_rows.remove((opposite, types), row)
            self.fact_rows.add((name, types), row)

    def check_goal(self) -> bool:
        return self._library.won(self._id)

    def replan(self, infos: Mapping[str, EntityInfo]) -> list[str]:
        """Commands that win from here. Only here is the second, search-oriented translation made."""
        if self._planning_sas is None:
            self._planning_sas = translate_for_planning(self._game["pddl_domain"], self._game["pddl_problem"]).encode()
        with self._library.at(self._id) as c:
            c.load_sas_replan(self._planning_sas)
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

    _pddl_state: EngineState
    state: GameState
    prev_state: GameState

    def __init__(self, infos: EnvInfos | None = None) -> None:
        Environment.__init__(self, infos)  # not PddlEnv's: it would load a library copy of its own

    def close(self) -> None:
        """Let go of the library; the engine may be loaded or reset again."""
        if hasattr(self, "_pddl_state"):
            self._pddl_state.close()

    def load(self, filename_or_data: str | Mapping[str, Any]) -> None:
        if isinstance(filename_or_data, Mapping):
            data, self._game_file = filename_or_data, None
        else:
            with open(filename_or_data, encoding="utf-8") as file:
                data, self._game_file = json.load(file), filename_or_data
        self._game_data = data
        self.walkthrough = data.get("walkthrough")
        self._translation = translate(data["pddl_domain"], data["pddl_problem"])
        self._logic = load_logic(data["grammar"], self._translation.types)
        self._templates = sorted({action.template for action in self._logic.actions.values()})
        self._entity_infos = self._get_entity_infos()

    def _get_entity_infos(self) -> dict[str, EntityInfo]:
        infos: dict[str, EntityInfo] = {}
        for (_, types), rows in self._translation.initial.items():
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
        commands = self.state["_valid_commands"] = []
        for action in actions:
            context = Context.of(state.fact_rows, self._entity_infos, action.mapping)
            action.command_template = self._logic.grammar.derive(action.command_template, context)
            commands.append(action.command_template.format(**self._names))
        self.state["admissible_commands"] = sorted(set(commands))
        if self.request_infos.moves:
            self.state["moves"] = self._moves
        if self.request_infos.policy_commands:
            self.state["policy_commands"] = state.replan(self._entity_infos)

    def reset(self) -> GameState:
        self.close()
        self._pddl_state = EngineState(self._translation, self._game_data, self._logic)
        self._names = {key: info.name for key, info in self._entity_infos.items()}
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
