# A Pod that asks for an NPU has to name npu-binpack-scheduler: scheduler-name-refuse, for OPA.
package kubernetes.admission

# Not rego.v1: OPA before 0.59 cannot read it. Newer ones read both.
import future.keywords

# With a prefix of their own, as other policies live in this package too.
npu_scheduler := "npu-binpack-scheduler"

npu_resources(pod) := {name |
	some list in ["containers", "initContainers"]
	some container in object.get(pod.spec, list, [])
	some name, _ in object.get(container, ["resources", "limits"], {})
	regex.match(`^((alpha|beta)[.])?furiosa[.]ai/`, name)
}

npu_pod_name(pod) := pod.metadata.name

npu_pod_name(pod) := pod.metadata.generateName if not pod.metadata.name

deny contains message if {
	input.request.kind.kind == "Pod"
	input.request.operation == "CREATE"
	pod := input.request.object

	# No scheduler places a Pod that is born with its node.
	object.get(pod.spec, "nodeName", "") == ""
	resources := npu_resources(pod)
	count(resources) > 0
	scheduler := object.get(pod.spec, "schedulerName", "default-scheduler")
	scheduler != npu_scheduler
	message := sprintf(
		concat(" ", [
			"Pod %s asks for %s and has spec.schedulerName %s: write schedulerName: %s into the spec of the",
			"Pod, or of the Pod template that it comes from",
		]),
		[npu_pod_name(pod), concat(", ", sort(resources)), scheduler, npu_scheduler],
	)
}
