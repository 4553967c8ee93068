// Asks OpenShift's own admission code whether Pods are admitted under a SecurityContextConstraints.
//
// Reads a stream of JSON objects {"scc": …, "pod": …} and writes for each a line of JSON: a list of
// the reasons against the Pod, empty if it is admitted.
package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"

	securityv1 "github.com/openshift/api/security/v1"
	"github.com/openshift/apiserver-library-go/pkg/securitycontextconstraints/sccdefaults"
	"github.com/openshift/apiserver-library-go/pkg/securitycontextconstraints/sccmatching"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/apis/core"
	convert "k8s.io/kubernetes/pkg/apis/core/v1"
)

// What OpenShift gives each namespace.
var namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
	Name: "npu-system",
	Annotations: map[string]string{
		securityv1.UIDRangeAnnotation:           "1000700000/10000",
		securityv1.MCSAnnotation:                "s0:c26,c15",
		securityv1.SupplementalGroupsAnnotation: "1000700000/10000",
	},
}}

func reasons(scc *securityv1.SecurityContextConstraints, pod *corev1.Pod) ([]string, error) {
	var internal core.Pod
	sccdefaults.SetDefaults_SCC(scc)
	convert.SetObjectDefaults_Pod(pod)
	if err := convert.Convert_v1_Pod_To_core_Pod(pod, &internal, nil); err != nil {
		return nil, err
	}
	provider, err := sccmatching.CreateProviderFromConstraint(namespace, scc)
	if err != nil {
		return nil, err
	}
	found := []string{}
	for _, each := range sccmatching.AssignSecurityContext(provider, &internal, nil) {
		found = append(found, each.Error())
	}
	return found, nil
}

func main() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var question struct {
			SCC securityv1.SecurityContextConstraints `json:"scc"`
			Pod corev1.Pod                            `json:"pod"`
		}
		if err := in.Decode(&question); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		found, err := reasons(&question.SCC, &question.Pod)
		if err != nil {
			log.Fatal(err)
		}
		if err := out.Encode(found); err != nil {
			log.Fatal(err)
		}
	}
}
