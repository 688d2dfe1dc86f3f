{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "octavo.name" .) .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name (include "octavo.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Name of cluster-scoped objects: releases of the same name in two namespaces must not collide. */ -}}
{{- define "octavo.clusterName" -}}
{{- printf "%s-%s" (include "octavo.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "octavo.selectorLabels" -}}
app.kubernetes.io/name: {{ include "octavo.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Pod labels: the selector's, and the user's; the selector's win. */ -}}
{{- define "octavo.podLabels" -}}
{{ toYaml (merge (include "octavo.selectorLabels" . | fromYaml) (default dict .Values.podLabels)) }}
{{- end -}}

{{- define "octavo.labels" -}}
{{ include "octavo.labelsWith" (list . dict) }}
{{- end -}}

{{- /* Labels of an object with additional ones, without duplicate keys. Takes (list context labels). */ -}}
{{- define "octavo.labelsWith" -}}
{{- $context := index . 0 -}}{{- $more := index . 1 -}}
{{- $ours := merge (include "octavo.selectorLabels" $context | fromYaml) (dict
  "app.kubernetes.io/version" $context.Chart.AppVersion
  "app.kubernetes.io/part-of" "octavo"
  "app.kubernetes.io/managed-by" $context.Release.Service
  "helm.sh/chart" (printf "%s-%s" $context.Chart.Name $context.Chart.Version | replace "+" "_")) -}}
{{ toYaml (merge $ours (default dict $more) (default dict $context.Values.commonLabels)) }}
{{- end -}}

{{- define "octavo.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "octavo.fullname" . -}}
{{- else -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name" -}}
{{- end -}}
{{- end -}}

{{- /* Repository of an image; global.imageRegistry takes the place of its registry. Takes (list image context). */ -}}
{{- define "octavo.repository" -}}
{{- $repository := (index . 0).repository -}}{{- $registry := ((index . 1).Values.global).imageRegistry -}}
{{- if $registry -}}
{{- $first := first (splitList "/" $repository) -}}
{{- if and (contains "/" $repository) (or (regexMatch "[.:]" $first) (eq $first "localhost")) -}}
{{- $repository = trimPrefix (printf "%s/" $first) $repository -}}
{{- end -}}
{{- $repository = printf "%s/%s" $registry $repository -}}
{{- end -}}
{{- $repository -}}
{{- end -}}

{{- /* Image by digest, otherwise tag, otherwise what was published with this chart: by digest where that is known, else
       the chart's appVersion. Takes (list image context). */ -}}
{{- define "octavo.image" -}}
{{- $image := index . 0 -}}{{- $context := index . 1 -}}{{- $repository := include "octavo.repository" . -}}
{{- $digest := $image.digest -}}
{{- if not (or $digest $image.tag) -}}
{{- range (index $context.Chart.Annotations "artifacthub.io/images") | default "" | fromYamlArray -}}
{{- if hasPrefix (printf "%s@" $repository) .image -}}{{- $digest = last (splitList "@" .image) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if $digest -}}
{{- printf "%s@%s" $repository $digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default $context.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Names of Secrets, given by name or as Kubernetes has them ({name: x}), with those of global.imagePullSecrets; a
       list in JSON. Takes (list secrets context). */ -}}
{{- define "octavo.pullSecrets" -}}
{{- $names := list -}}
{{- range concat (default list ((index . 1).Values.global).imagePullSecrets) (default list (index . 0)) -}}
{{- if kindIs "map" . -}}{{- $names = append $names .name -}}{{- else -}}{{- $names = append $names . -}}{{- end -}}
{{- end -}}
{{- uniq $names | toJson -}}
{{- end -}}

{{- /* Fails where pods would wait for images that nobody has published. Without replicas none is pulled. */ -}}
{{- define "octavo.checkImages" -}}
{{- if and (index .Chart.Annotations "octavo.dev/unpublished") (gt (int .Values.replicas) 0) -}}
{{- $values := list -}}{{- $context := . -}}
{{- range $name, $image := dict "image" .Values.image "engine.image" .Values.engine.image "router.image" .Values.router.image -}}
{{- if and (hasPrefix "ghcr.io/octavo-dev/" (include "octavo.repository" (list $image $context))) (not $image.digest) -}}{{- $values = append $values (printf "%s.repository" $name) -}}{{- end -}}
{{- end -}}
{{- if $values -}}
{{- fail (printf "the default images of %s are not published: build and push yours (make image IMAGE_PREFIX=registry.example.com/octavo-dev) and set %s, or global.imageRegistry=registry.example.com for all, or install a published chart" .Chart.Version (join ", " $values)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The Service of the leader's metrics API. */ -}}
{{- define "octavo.metricsService" -}}
{{- printf "%s-metrics" (include "octavo.fullname" .) -}}
{{- end -}}

{{- /* The ClusterRole for serving external.metrics.k8s.io. */ -}}
{{- define "octavo.metricsRole" -}}
{{- printf "%s-metrics" (include "octavo.clusterName" .) -}}
{{- end -}}

{{- /* "true" where the operator may serve external.metrics.k8s.io. */ -}}
{{- define "octavo.metricsApi" -}}
{{- if and .Values.metricsApi.enabled (not .Values.watchNamespaces) -}}true{{- else -}}false{{- end -}}
{{- end -}}

{{- /* Permissions in the watched namespaces. Secrets are never read: pods refer to them by name. */ -}}
{{- define "octavo.servingRules" -}}
- apiGroups: [octavo.dev]
  resources: [llmdeployments, llmgateways]
  verbs: [get, list, watch]
- apiGroups: [octavo.dev]
  resources: [llmdeployments/status, llmdeployments/scale, llmgateways/status]
  verbs: [patch]
# Where OwnerReferencesPermissionEnforcement is on: children keep their owner until they are gone (--cascade=foreground).
- apiGroups: [octavo.dev]
  resources: [llmdeployments/finalizers, llmgateways/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]  # patch: annotations, so that a gateway's routers see a new model at once
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]  # of a group of pods that has places for some of them only
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]  # with a token for groups of pods (parallelism.nodes); none is ever read
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
# Leases of other operators, to tell whether their claims are valid.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end -}}
