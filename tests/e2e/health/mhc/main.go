// Cluster API's own MachineHealthCheck controller, without the rest of Cluster API: the test makes
// the Cluster and the Machine that the other controllers would make.
package main

import (
	"log"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/core/reconcilers/machinehealthcheck"
	"sigs.k8s.io/cluster-api/util/index"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	ctrl.SetLogger(zap.New())
	ctx := ctrl.SetupSignalHandler()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, apiextensionsv1.AddToScheme, clusterv1.AddToScheme,
	} {
		check(add(scheme))
	}
	manager, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:  scheme,
		Metrics: server.Options{BindAddress: "0"},
	})
	check(err)
	check(index.ByMachineNode(ctx, manager))
	clusters, err := clustercache.SetupWithManager(ctx, manager, clustercache.Options{
		SecretClient: manager.GetAPIReader(),
		Client:       clustercache.ClientOptions{UserAgent: "machinehealthcheck"},
		Cache: clustercache.CacheOptions{
			Indexes: []clustercache.CacheOptionsIndex{clustercache.NodeProviderIDIndex},
		},
	}, controller.Options{})
	check(err)
	reconciler := &machinehealthcheck.Reconciler{Client: manager.GetClient(), ClusterCache: clusters}
	check(reconciler.SetupWithManager(ctx, manager, controller.Options{}))
	check(manager.Start(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
