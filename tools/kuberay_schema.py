"""Writes KubeRay's schema of a RayJob as a strict JSON schema, by which the tests check the manifests of docs/deploy/.

    python tools/kuberay_schema.py ray-operator/config/crd/bases/ray.io_rayjobs.yaml v1.7.0 > SCHEMA

The file is from https://github.com/ray-project/kuberay (Apache-2.0), and SCHEMA is tests/deploy/rayjob.schema.json.
Descriptions and status are left out, what is there several times, like templates of pods, is there once, and fields
that the schema does not name are errors: Kubernetes drops these without a word.
"""

import json
import sys
from collections import Counter

import yaml

KEPT = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "required")
SHARED_NBYTES = 400  # a part that is longer, and there several times, becomes a definition


def strict(schema):
    """The part of an OpenAPI schema that says what is right, in which other fields are wrong."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {name: schema[name] for name in KEPT if name in schema}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found[name] = strict(schema[name])
    if "properties" in schema:
        found["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


def shared(schema):
    """The schema with what it has several times as definitions."""
    counts = Counter(text for text in parts(schema) if len(text) > SHARED_NBYTES)
    names = {text: f"d{number}" for number, text in enumerate(sorted(text for text, n in counts.items() if n > 1))}

    def referring(part, is_definition=False):
        name = names.get(json.dumps(part, sort_keys=True))
        if name and not is_definition:
            return {"$ref": f"#/$defs/{name}"}
        return within(part, referring)

    definitions = {name: referring(json.loads(text), is_definition=True) for text, name in names.items()}
    return {**referring(schema), "$defs": definitions}


def parts(schema):
    """A schema and all schemas in it, as text."""
    found = [json.dumps(schema, sort_keys=True)]
    within(schema, lambda part: found.extend(parts(part)))
    return found


def within(schema, change):
    """A schema in which the schemas directly in it were changed by a function."""
    found = dict(schema)
    for name in ("items", "additionalProperties"):
        if isinstance(found.get(name), dict):
            found[name] = change(found[name])
    if "properties" in found:
        found["properties"] = {name: change(part) for name, part in found["properties"].items()}
    return found


def main(path, version):
    """Print the schema of a file with a CustomResourceDefinition."""
    with open(path) as file:
        definition = yaml.safe_load(file)
    schema = next(one for one in definition["spec"]["versions"] if one["name"] == "v1")["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]
    metadata = {"type": "object", "required": ["name"]}
    found = strict(schema)
    found["properties"].update(metadata=metadata, apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"})
    found["required"] = ["apiVersion", "kind", "metadata", "spec"]
    source = f"Derived from KubeRay {version}, ray-operator/config/crd/bases/{path.rpartition('/')[2]}, Apache-2.0."
    print(json.dumps({"$comment": source, **shared(found)}, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
