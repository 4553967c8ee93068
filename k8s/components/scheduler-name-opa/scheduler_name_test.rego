package kubernetes.admission_test

import data.kubernetes.admission
import future.keywords

request(spec) := {"request": {
	"kind": {"group": "", "version": "v1", "kind": "Pod"},
	"operation": "CREATE",
	"object": {"metadata": {"name": "train"}, "spec": spec},
}}

asking(resource) := {"name": "main", "resources": {"limits": {resource: "1"}}}

plain := {"name": "plain", "resources": {"limits": {"cpu": "1", "example.com/gpu": "1"}}}

denied(input_) := messages if {
	messages := admission.deny with input as input_
}

test_the_message_names_pod_value_and_remedy if {
	spec := {"containers": [asking("beta.furiosa.ai/npu")], "schedulerName": "default-scheduler"}
	denied(request(spec)) == {concat(" ", [
		"Pod train asks for beta.furiosa.ai/npu and has spec.schedulerName default-scheduler:",
		"write schedulerName: npu-binpack-scheduler into the spec of the Pod,",
		"or of the Pod template that it comes from",
	])}
}

test_every_resource_of_the_vendor_counts if {
	every resource in [
		"alpha.furiosa.ai/npu",
		"beta.furiosa.ai/npu",
		"furiosa.ai/warboy",
		"furiosa.ai/rngd-2core.12gb",
	] {
		count(denied(request({"containers": [plain, asking(resource)]}))) == 1
	}
}

test_others_resources_do_not if {
	every resource in ["example.com/npu", "notfuriosa.ai/npu", "beta.furiosa.ai.example.com/npu"] {
		count(denied(request({"containers": [asking(resource)]}))) == 0
	}
}

test_init_containers_count if {
	spec := {"containers": [plain], "initContainers": [asking("furiosa.ai/rngd")]}
	count(denied(request(spec))) == 1
}

test_the_binpack_scheduler_is_allowed if {
	spec := {"containers": [asking("furiosa.ai/rngd")], "schedulerName": "npu-binpack-scheduler"}
	count(denied(request(spec))) == 0
}

test_a_third_scheduler_is_refused if {
	spec := {"containers": [asking("furiosa.ai/rngd")], "schedulerName": "other"}
	count(denied(request(spec))) == 1
}

test_a_pod_born_with_its_node_is_exempt if {
	spec := {"containers": [asking("furiosa.ai/rngd")], "nodeName": "worker-1"}
	count(denied(request(spec))) == 0
}

test_a_pod_without_resources_is_allowed if {
	count(denied(request({"containers": [{"name": "plain"}]}))) == 0
}

test_a_pod_of_a_controller_is_named_by_its_prefix if {
	asked := request({"containers": [asking("furiosa.ai/rngd")]})
	review := json.patch(asked, [{
		"op": "replace",
		"path": "/request/object/metadata",
		"value": {"generateName": "train-"},
	}])
	some message in denied(review)
	startswith(message, "Pod train- asks")
}

test_updates_and_other_kinds_are_not_looked_at if {
	asked := request({"containers": [asking("furiosa.ai/rngd")]})
	every path, value in {"/request/operation": "UPDATE", "/request/kind/kind": "Node"} {
		count(denied(json.patch(asked, [{"op": "replace", "path": path, "value": value}]))) == 0
	}
}
